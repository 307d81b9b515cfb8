"""Commands of the trainer: `train`, `eval`, and `replay --leave-out`."""
