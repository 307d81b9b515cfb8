"""Analysis of a kernel's text before it is rewritten: loops, shapes, values, and integer bounds."""
