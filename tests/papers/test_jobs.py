"""Parts of recipes in processes side by side: the same results as one after the other, and nothing left when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from problems import recipes as small
from problems.command_line import SCRIPT, Cli

from bnncli.papers import recipe
from bnncli.papers.runner import Workshop

LONG = "refinement/figure-[456]"  # minutes, with what travels with the package


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.glob("quick/test/*/*")} | {
        "all": (out / "quick/results.md").read_bytes()
    }


@pytest.mark.nightly
def test_side_by_side_results_are_byte_for_byte_those_of_one_after_the_other(
    data: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "WORKS", (small.__name__,))  # which other processes can import
    for file, what in small.FILES.items():
        monkeypatch.setitem(recipe.FILES, file, what)
    words = ("reproduce", "--all", "--data", data, "--out", tmp_path / "out", "--threads", 1, "--json", "--jobs")
    first = cli(*words, 1)
    before = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "before")
    second = cli(*words, 2)
    assert (first.code, second.code) == (0, 0), second.stderr
    assert contents(tmp_path / "out") == before
    assert len(before) == 9
    seconds = [one["seconds"] for one in second.json["recipes"]]
    assert all(seconds), seconds


def children(process: int) -> list[int]:
    """Processes that a process has begun and that work: not the one that looks after shared memory."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(one) for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("all", -9, ""),
        ("all in an orderly way", 143, "hint: continue with: bnncli reproduce"),
        ("one", 69, "ended unexpectedly, with signal 9"),
    ],
)
def test_after_a_kill_no_process_is_left(tmp_path: Path, what: str, code: int, said: str) -> None:
    words = [SCRIPT, "reproduce", LONG, "--out", tmp_path / "out", "--jobs", "2"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while len(found := children(process.pid)) < 2 or not all(map(_has_begun, found)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if what == "one":
        os.kill(found[0], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGKILL if what == "all" else signal.SIGTERM)
    err = process.communicate(timeout=300)[1]
    assert (process.returncode, said in err) == (code, True), err
    while not all(map(is_gone, found)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _has_begun(process: int) -> bool:
    """Whether it has a group of its own, which it takes before it works."""
    return os.getpgid(process) == process


def test_an_experiment_waits_only_for_the_studies_whose_files_it_reads(tmp_path: Path) -> None:
    found: Any = recipe.find_recipe("refinement/figure-7")
    assert found.studies
    assert not found.after
    places = SimpleNamespace(found=lambda needs: {})
    workshop = Workshop(SimpleNamespace(), SimpleNamespace(scale="quick"), places, tmp_path)  # type: ignore[arg-type]
    assert workshop._files(found) == ({}, "")
