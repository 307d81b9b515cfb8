"""torch.compile's max-autotune: fewer choices compiled, every timing kept."""
