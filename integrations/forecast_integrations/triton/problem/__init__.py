"""From one call of a kernel to the records of a problem and its candidates."""
