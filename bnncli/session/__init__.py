"""What the commands share: the run, its inputs, and how an artifact is made."""
