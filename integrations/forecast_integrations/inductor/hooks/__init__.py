"""Hooks in torch's own code; each can be removed again."""
