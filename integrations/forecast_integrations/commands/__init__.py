"""Commands that need a live framework: `run`, `demo`, and `doctor`'s checks of models."""
