"""Networks by name: built in (one file each in this folder), importable, or in a Python file."""

from __future__ import annotations

from bnncli.networks._load import fill_network, load_network

__all__ = ["fill_network", "load_network"]
