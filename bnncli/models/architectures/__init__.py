"""Networks by name: built in (one file each in this folder), importable, or in a Python file."""

from __future__ import annotations

from bnncli.models.build import describe_name_mapping, fill_network, load_network, recognise_networks, takes_argument

__all__ = ["describe_name_mapping", "fill_network", "load_network", "recognise_networks", "takes_argument"]
