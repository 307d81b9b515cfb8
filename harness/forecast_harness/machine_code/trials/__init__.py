"""What is launched of a kernel or a pack that is judged through machine code."""
