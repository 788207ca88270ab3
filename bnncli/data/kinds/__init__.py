"""Kinds of data, one file each: `FORM` names it, `exists` and `open_dataset` read it. Adding a file adds a kind."""
