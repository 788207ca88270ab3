"""What several test files set up alike, one idea a file: numbers drawn by seed, heads and their targets, oracles, runs."""
