"""Offline search, problem packs and verification (grows with the Harness issue)."""
