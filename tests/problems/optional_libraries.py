"""Libraries that the package does not bring, for tests that need one: skipped without it."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch


def library(name: str) -> ModuleType:
    """The library; the test file that asks for it is skipped where it is not installed."""
    if name in ("lightning", "peft", "timm", "torchvision", "transformers"):
        _torchvision_operators()
    return cast(ModuleType, pytest.importorskip(name))


@cache
def _torchvision_operators() -> Any:
    """Names for torchvision's compiled operators where its build is for another torch; its Python parts need no more."""
    try:
        spec = importlib.util.find_spec("torchvision")
        return None if spec is None else importlib.import_module("torchvision")
    except RuntimeError:
        for part in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[part]
    operators = torch.library.Library("torchvision", "DEF")
    text = (Path(str(spec.origin)).parent / "_meta_registrations.py").read_text()
    for name in sorted({*re.findall(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"\)', text)}):
        operators.define(f"{name}(Tensor x) -> Tensor")
    return operators
