"""What a kernel's text shows before it is rewritten: loops, shapes, values, and integer bounds."""
