"""The machine that a command runs on: devices, signals, files as they come, the code of users."""
