"""Where torch's own code is hooked; each hook can be taken out again."""
