"""Freshness: content decides, never times or paths; what is there is never lost without being told to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from bnncli.artifacts.files import read_header, write_metrics
from bnncli.artifacts.freshness import UNKNOWN_MAKER, Stale, check_fresh, decide, staleness
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source, build_provenance
from bnncli.errors import DataError, OutputExists, UsageError

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


def source_of(path: Path, role: str = "input0") -> Source:
    return Source(role, path, read_header(path).content_digest)


def test_where_nothing_is_it_is_computed(tmp_path: Path) -> None:
    assert ask(tmp_path / "x").action == "compute"


def test_the_same_request_is_skipped_whatever_the_times_say(tmp_path: Path) -> None:
    upstream, path = tmp_path / "up", tmp_path / "x"
    make(upstream)
    make(path, inputs=(upstream,))
    os.utime(upstream, (2**33, 2**33))
    os.utime(path, (0, 0))
    assert ask(path, sources=[source_of(upstream)]).action == "skip"
    assert ask(path, sources=[source_of(upstream)], force=True).action == "replace"


def test_other_parameters_are_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(OutputExists, match=r"epochs: existing=3, requested=4") as caught:
        ask(tmp_path / "x", params={"epochs": 4})
    assert caught.value.exit == 73
    assert caught.value.hint == "add \0force\0 to replace it"  # metrics have no name of their own
    assert ask(tmp_path / "x", params={"epochs": 4}, force=True).action == "replace"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"algo_rev": 2}, "revision"), ({"weights_digest": "other"}, "checkpoint"), ({"sources": []}, "input0")],
)
def test_a_stale_artifact_is_replaced_and_the_reason_is_told(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    make(tmp_path / "up")
    make(tmp_path / "x", inputs=(tmp_path / "up",))
    decision = ask(tmp_path / "x", **{"sources": [source_of(tmp_path / "up")], **change})
    assert decision.action == "replace"
    assert why in decision.why


FOREIGN = {
    "text": b"my thesis, made with bnncli",
    "script": b"#!/bin/sh\nbnncli refine x\n",
    "json": b'{"tool": "bnncli"}',
    "zip": b"PK\x03\x04 bnncli_kind",
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_file_is_never_replaced(tmp_path: Path, content: bytes, force: bool) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(OutputExists, match="cannot be used") as caught:
        ask(tmp_path / "x", force=force)
    assert "\0force\0" not in str(caught.value.hint)


def test_a_damaged_artifact_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "x"
    make(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(OutputExists, match="cannot be used") as caught:
        ask(path)
    assert "\0force\0" in str(caught.value.hint)
    assert ask(path, force=True).action == "replace"


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


@pytest.mark.parametrize("way", ["itself", "symbolic link", "hard link", "dots"])
def test_an_output_that_is_an_input_is_refused_by_any_path(tmp_path: Path, way: str) -> None:
    path, other = tmp_path / "x", tmp_path / "other"
    make(path)
    make_link = {"symbolic link": other.symlink_to, "hard link": other.hardlink_to}
    if way in make_link:
        make_link[way](path)
    target = {"itself": path, "dots": tmp_path / ".." / tmp_path.name / "x"}.get(way, other)
    with pytest.raises(UsageError, match="also an input") as caught:
        ask(target, sources=[source_of(path)], force=True)
    assert caught.value.exit == 2


def never(header: Header) -> bool:
    return False


def test_a_chain_is_fresh_until_its_first_input_changes(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name / "x" for name in "abc")
    make(first)
    make(second, inputs=(first,))
    header = make(third, inputs=(second,))
    assert staleness(header, is_another=never, weights_digest="w") is None
    make(first, value=1)
    assert "stale: input0 (x) has changed" in str(staleness(header, is_another=never, weights_digest="w"))
    first.unlink()
    assert "is missing" in str(staleness(header, is_another=never, weights_digest="w"))


def test_a_chain_is_stale_where_an_algorithm_has_changed(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name / "x" for name in "abc")
    make(first)
    make(second, inputs=(first,))
    header, followed = make(third, inputs=(second,)), {}
    why = "made by another revision of the algorithm"
    assert staleness(header, is_another=lambda header: header.path.samefile(third)) == Stale(why)
    assert staleness(header, is_another=lambda header: header.path.samefile(first), followed=followed) == Stale(
        f"input0 (x) is stale: input0 (x) is stale: {why}"
    )
    assert {path: stale for (path, _), (_, stale) in followed.items()}[first] == Stale(why)


def test_moving_a_run_does_not_make_it_stale(tmp_path: Path) -> None:
    make(tmp_path / "run" / "a" / "x")
    make(tmp_path / "run" / "b" / "x", inputs=(tmp_path / "run" / "a" / "x",))
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert staleness(read_header(tmp_path / "moved" / "b" / "x"), is_another=never, weights_digest="w") is None


def test_another_checkpoint_makes_it_stale(tmp_path: Path) -> None:
    header = make(tmp_path / "x")
    assert staleness(header, is_another=never, weights_digest="other") == Stale("the checkpoint has changed")


def test_a_stale_input_is_refused_with_the_command_that_makes_it_again(tmp_path: Path) -> None:
    make(tmp_path / "up")
    header = make(tmp_path / "it's", inputs=(tmp_path / "up",))
    check_fresh(header, is_another=never, weights_digest="w", remake=lambda header, *, force=False: "bnncli x")
    make(tmp_path / "up", value=1)
    for command, hint in (("bnncli x", "bnncli x"), (None, UNKNOWN_MAKER)):
        with pytest.raises(DataError, match="is stale: input0") as caught:
            check_fresh(
                header,
                is_another=never,
                weights_digest="w",
                remake=lambda header, *, force=False, command=command: command,
            )
        assert (caught.value.exit, caught.value.code) == (65, "stale_input")
        assert caught.value.hint == hint
