"""What names predictions that are there already: an integrator, perhaps with the settings that it predicted by."""

from __future__ import annotations

from collections.abc import Sequence

from bnncli import registry
from bnncli.names import not_one_of


def check_variant(value: str | Sequence[str] | None, flag: str) -> None:
    """Raise UsageError where a name, or one of several, is no integrator's, alone or before a dash and settings."""
    families = registry.names("integrators")
    for name in [value] if isinstance(value, str) else value or ():
        if not any(name == family or name.startswith(f"{family}-") for family in families):
            raise not_one_of(flag, name, families, also=["or one with its settings"])
