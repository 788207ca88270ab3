"""Declaration of options, and the options that commands share."""
