"""The provenance of an artifact: bnncli.provenance/1, the same in every kind of file."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bnncli import __version__
from bnncli.numerics.digests import json_sha256

_SECRET = re.compile(r"((?:token|secret|passw(?:or)?d|(?:api|access)[_-]?key)(?:[_-]\w*)?=)[^&#;,\s]+", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/\s:@]+:[^/\s@]+@")
_PACKAGES = ("torch", "numpy", "h5py", "safetensors", "scikit-learn", "arviz-stats", "pyro-ppl")


@dataclass(frozen=True)
class Source:
    """A direct input: role, path and content; `is_artifact` is False for the user's data."""

    role: str
    path: Path
    content_digest: str
    is_artifact: bool = True

    def to_json(self, folder: Path) -> dict[str, Any]:
        """Return the provenance entry, with the path relative to the artifact's folder."""
        path = os.path.relpath(self.path.resolve(), folder.resolve())
        entry: dict[str, Any] = {"role": self.role, "path": path, "content_digest": self.content_digest}
        return entry if self.is_artifact else {**entry, "is_artifact": False}


def params_hash(params: Mapping[str, Any]) -> str:
    """Return the digest of the parameters that change numbers."""
    return json_sha256(dict(params))


def build_provenance(
    target: Path,
    *,
    command: Sequence[str],
    params: Mapping[str, Any],
    algo_rev: int,
    inputs: Sequence[Source],
    checkpoint: Mapping[str, Any] | None,
    environment: Mapping[str, Any],
    seconds: float,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Return the provenance of an artifact to be written at `target`.

    Args:
        environment: seed, deterministic, device, gpu, threads.
        seconds: wall time of the computation.
    """
    return {
        "schema": "bnncli.provenance/1",
        "tool": {"name": "bnncli", "version": __version__, **_git_state()},
        "command": [_mask_secrets(word.encode("utf-8", "backslashreplace").decode()) for word in command],
        "params": dict(params),
        "params_hash": params_hash(params),
        "algo_rev": algo_rev,
        **environment,
        "versions": _versions(),
        "checkpoint": None if checkpoint is None else dict(checkpoint),
        "inputs": [source.to_json(target.parent) for source in inputs],
        "created_at": _now(),
        "seconds": round(seconds, 3),
        "platform": f"{platform.system()}-{platform.release()}-{platform.machine()}",
        "warnings": list(warnings),
    }


def _mask_secrets(word: str) -> str:
    """Mask what looks like a password or token in a command-line word, since artifacts are passed on."""
    return _PASSWORD.sub("://***@", _SECRET.sub(r"\1***", word))


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    is_given = epoch is not None and epoch.isdecimal() and len(epoch) <= 11
    moment = datetime.fromtimestamp(int(epoch or 0), UTC) if is_given else datetime.now(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def _git_state() -> dict[str, Any]:
    """Return the commit of bnncli's own checkout, never of the current directory; None if installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return {"git_sha": None, "git_dirty": None}
    try:
        sha = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
        changes = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain"],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return {"git_sha": None, "git_dirty": None}
    return {"git_sha": sha.stdout.strip(), "git_dirty": bool(changes.stdout.strip())}
