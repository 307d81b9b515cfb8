"""The command line as a process: words, streams, signals, missing packages, exit status."""
