"""From a running program to faster kernels: record it, choose, search, prove in the program, leave what holds."""
