"""What is compiled before it is launched: for which calls, beside whom, and what is kept of it."""
