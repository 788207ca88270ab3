"""The script of pages, which are complete without it: page.js sorts tables by their columns."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files


@cache
def script() -> str:
    """All of it."""
    return files("bnncli.pages").joinpath("page.js").read_text(encoding="utf-8")


def script_hash() -> str:
    """What a page's policy calls the script, so that no other runs."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
