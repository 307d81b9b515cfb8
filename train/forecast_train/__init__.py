"""From the store to better surrogates (grows with the Trainer issue)."""
