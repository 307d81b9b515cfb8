"""The GPU as the runner sees it: the driver, memory, graphs and kernels of its own."""
