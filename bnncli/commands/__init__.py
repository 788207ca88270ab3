"""The commands: one file each, or a package where one file would be too long.

A command declares its options, `COMMAND` and `execute(run, options)`. Help reads the declaration without importing the file. A command
that writes posteriors also needs a revision in `session/revisions.py`, by which old files are seen to be stale.
"""
