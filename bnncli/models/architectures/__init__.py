"""Networks by name: built in (one file each in this folder), importable, or in a Python file."""

from __future__ import annotations

from bnncli.models.build import fill_network, load_network, notes_on_names, recognised, takes_argument

__all__ = ["fill_network", "load_network", "notes_on_names", "recognised", "takes_argument"]
