"""The judge: one source on its way to a verdict."""
