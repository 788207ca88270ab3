"""The layout that a posterior's header records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.theta.head import HeadLayout
from bnncli.theta.module import ModuleLayout


def recorded_layout(meta: Mapping[str, Any]) -> HeadLayout | ModuleLayout:
    """Of a head, or of a network's parameters."""
    return ModuleLayout.from_meta(meta) if "network_params" in meta else HeadLayout.from_meta(meta)
