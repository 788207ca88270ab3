"""What is taken from a network: its head, and the features that the head sees."""
