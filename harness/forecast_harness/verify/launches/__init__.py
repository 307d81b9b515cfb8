"""One launch under suspicion: memory between canaries, digests, and what came back."""
