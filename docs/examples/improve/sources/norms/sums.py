# another norm: wrong
def run(x):
    return x.abs().sum(-1).clamp(min=1e-06)
