"""Parts of an installed distribution, as entry points give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from bnncli import registry


@contextmanager
def installed_parts(folder: Path, group: str, parts: Mapping[str, str]) -> Iterator[None]:
    """Have a distribution on the search path whose entry points of a group name modules."""
    caches = [one for one in vars(registry).values() if hasattr(one, "cache_clear")]
    metadata = folder / "theirs-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    lines = [f"[bnncli.{group}]", *(f"{name} = {module}" for name, module in parts.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for one in caches:
            one.cache_clear()
        yield
    for one in caches:
        one.cache_clear()
