"""Kinds of saved models, one file each: `FORM`, `EXTRA` and `open_model`. Adding a file adds a kind."""
