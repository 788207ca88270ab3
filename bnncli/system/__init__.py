"""The machine that a command runs on: devices, memory, signals, workers, input files, and users' own code."""
