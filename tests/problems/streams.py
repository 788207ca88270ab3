"""What happens ahead of each write to a file of records: a wait, or a failure of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


def before_writes(patch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Call `before` ahead of each record that is appended to a file which is opened from now on."""
    plain = os.fdopen

    class Watched:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

        def write(self, content: Any) -> int:
            before()
            written: int = self.stream.write(content)
            return written

    def opened(descriptor: int, mode: str = "r", *more: Any, **named: Any) -> Any:
        stream = plain(descriptor, mode, *more, **named)
        return Watched(stream) if mode == "r+b" else stream

    patch.setattr(os, "fdopen", opened)
