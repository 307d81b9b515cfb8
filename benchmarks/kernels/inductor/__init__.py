"""Code as torch Inductor generates it: flat indices, numel arguments, masked accumulators, no strides."""
