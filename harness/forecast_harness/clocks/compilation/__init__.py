"""Sources made machine code by sandboxed workers, and checks of what they answer."""
