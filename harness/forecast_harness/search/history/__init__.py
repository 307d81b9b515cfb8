"""What a search has done: its log, the state that the log adds up to, and answers that were paid for."""
