"""Blocks of the documentation's pages, and how they are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The embedded data are smaller than those of the pages, and nobody reads what the chains say.
SMALLER = {":2000": ":600", "--risk 0.05": "--risk 0.2", "--draws 200": "--draws 20"}


class Block(NamedTuple):
    """A fenced block: its language, its text, and whether it is marked to be run."""

    language: str
    text: str
    runs: bool


def blocks_of(page: Path) -> list[Block]:
    found = re.findall(r"(<!-- run -->\n)?^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(language, text, bool(mark)) for mark, language, text in found]


def shortened(text: str) -> str:
    """A block for the embedded data."""
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text


def run_block(text: str, folder: Path, *, language: str = "sh") -> None:
    words = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
    command = folder / "bin" / "bnncli"
    if not command.exists():
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m bnncli "$@"\n')
        command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    surroundings = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, env=surroundings)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
