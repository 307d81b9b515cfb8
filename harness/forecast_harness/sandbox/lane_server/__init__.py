"""The fork-server of one lane, and what it starts: judges, cells, and who looks after them."""
