"""Freshness: content decides, never times or paths; what is there is never lost without being told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bnncli.artifacts.files import read_header, write_metrics
from bnncli.artifacts.freshness import Stale, decide, staleness
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source, build_provenance
from bnncli.errors import OutputExists

PARAMS = {"epochs": 3}


def make(
    path: Path, value: int = 0, *, inputs: tuple[Path, ...] = (), weights: str | None = "w", rev: int = 1
) -> Header:
    """A small artifact of ours, made from others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = [Source(f"input{n}", source, read_header(source).content_digest) for n, source in enumerate(inputs)]
    checkpoint = None if weights is None else {"file_sha256": "f", "weights_digest": weights}
    provenance = build_provenance(
        path, command=["bnncli", "make", path.name], params=PARAMS, algo_rev=rev, inputs=sources,
        checkpoint=checkpoint, environment={}, seconds=0.0, warnings=[],
    )  # fmt: skip
    write_metrics(path, rows=[{"value": value}], predictions=[], provenance=provenance, may_replace=True)
    return read_header(path)


def ask(path: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "kind": "metrics", "params": PARAMS, "algo_rev": 1, "sources": [], "weights_digest": "w", "force": False,
    }  # fmt: skip
    return decide(path, **{**given, **changes})


def test_an_artifact_of_another_kind_is_not_replaced_even_with_force(tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(OutputExists, match="is of kind metrics, expected posterior"):
        ask(tmp_path / "x", kind="posterior", force=True)


@pytest.mark.parametrize("kind", ["folder", "dangling link", "pipe"])
def test_what_is_not_a_file_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    {"folder": path.mkdir, "dangling link": lambda: path.symlink_to("none"), "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(OutputExists, match="cannot be used"):
        ask(path, force=True)


def never(header: Header) -> bool:
    return False


def test_another_checkpoint_makes_it_stale(tmp_path: Path) -> None:
    header = make(tmp_path / "x")
    assert staleness(header, is_another=never, weights_digest="other") == Stale("the checkpoint has changed")
