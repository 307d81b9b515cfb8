"""One decision from question to answer: the loop, its task, and what plays it without a GPU."""
