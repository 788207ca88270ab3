"""Shared steps of the commands: open the run, read its inputs and produce artifacts."""
