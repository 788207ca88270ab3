"""Lets torchvision be imported beside a torch that its compiled operators were not built for: what tests use needs none of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

_KEPT: list[torch.library.Library] = []  # operators last as long as their library


def importorskip(name: str) -> None:
    """Skips the test where `name` or torchvision, which it needs, is not installed."""
    spec = importlib.util.find_spec("torchvision")
    if importlib.util.find_spec(name) is None or spec is None or spec.origin is None:
        pytest.skip(f"{name} with torchvision is not installed")
    try:
        import torchvision
    except RuntimeError:
        _declare_operators(Path(spec.origin).parent)
        import torchvision  # noqa: F401


def _declare_operators(package: Path) -> None:
    """The names of its operators, to which torchvision adds shapes when it is imported."""
    text = (package / "_meta_registrations.py").read_text()
    names = set(re.findall(r'register_fake\("torchvision::(\w+)"\)|register_meta\("(\w+)"\)', text))
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted({first or second for first, second in names}):
        library.define(f"{name}(Tensor x) -> Tensor")
    _KEPT.append(library)
