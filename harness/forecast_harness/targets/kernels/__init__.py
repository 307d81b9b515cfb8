"""The kernel whose variants are looked for: its file or module, its text, its calls and launch grids."""
