"""Frameworks that ask for a tuned kernel: Triton now, torch.compile next."""
