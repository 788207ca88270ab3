"""Data by name: how splits are read. `kinds/` has one file for each kind of spec (npz, idx, images, csv, ...)."""
