"""Options: how one is declared, and those that commands share."""
