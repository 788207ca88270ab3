"""Options of stack."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked


@dataclass(frozen=True)
class StackOptions(Checked):
    """Options of stack: it has none of its own."""
