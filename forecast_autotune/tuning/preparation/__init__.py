"""What is known of a task's candidates before any is timed: their IR, which of them compile to one program, and when
each will have compiled. Nothing here imports the rest of `tuning`.
"""
