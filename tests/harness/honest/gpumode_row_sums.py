# mode: honest
# title: a submission in the format of GPU MODE
# backend: cpu
# pack: tasks/gpumode_scale
# language: torch
# expected: accepted
def custom_kernel(data):
    x, config = data
    return x.sum(dim=1).mul(config["factor"])
