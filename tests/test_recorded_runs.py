"""The command line does what it did when recorded_runs.json was made: see recorded_runs.py, which also makes it anew."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable

import pytest
from recorded_lines import LINES
from recorded_runs import RECORD, Record, differences, load, run_lines

from bnncli.cli.commands import own_commands

RECORDED = load(RECORD)


NETWORKS = {number for number, line in enumerate(LINES) if "tiny.pt" in line.words}
NUMBERS = [
    pytest.param(number, id=f"{number}-{line.words.split()[0]}", marks=pytest.mark.long if number in NETWORKS else ())
    for number, line in enumerate(LINES)
]


def run_some(numbers: Iterable[int]) -> dict[int, Record]:
    chosen = list(numbers)
    return dict(zip(chosen, run_lines(is_strict=False, lines=tuple(LINES[number] for number in chosen)), strict=True))


@pytest.fixture(scope="module")
def of_heads() -> dict[int, Record]:
    return run_some(number for number in range(len(LINES)) if number not in NETWORKS)


@pytest.fixture(scope="module")
def of_networks() -> dict[int, Record]:
    """What the lines on a small network's own parameters did: no other line depends on them."""
    return run_some(sorted(NETWORKS))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_command_line_does_what_it_did(request: pytest.FixtureRequest, number: int) -> None:
    found = request.getfixturevalue("of_networks" if number in NETWORKS else "of_heads")[number]
    told = differences(RECORDED[number : number + 1], [found], is_strict=False)
    assert not told, "\n".join(told)


def test_the_record_is_of_these_lines() -> None:
    assert [record["line"] for record in RECORDED] == [f"bnncli {line.words}" for line in LINES]


def test_every_command_is_in_the_record_but_those_that_are_others() -> None:
    others = {"demo", "grid", "reproduce"}  # the other commands, on larger data and in other processes
    commands = set(RECORDED[0]["stdout"]) - others
    assert commands == {command.parent or command.name for command in own_commands()} - others
    assert commands <= {line.argv[0] for line in LINES}


@pytest.mark.parametrize(
    ("option", "named"),
    [("--flow", "refine"), ("--integrator", "predict"), ("--structure", "fit-laplace"), ("--estimator", "fit-lbbnn")],
)
def test_every_choice_of_a_family_is_in_the_record(option: str, named: str) -> None:
    (refusal,) = [one for record in RECORDED for one in record["stderr"] if f"{option}: expected one of" in one]
    choices = set(re.split(r", |; ", refusal.partition("one of ")[2])[:-1])
    assert len(choices) > 2
    known = [(word, line) for line in LINES if line.argv[0] == named for word in line.argv]
    used = {word for word, _ in known} | {"affine", "lrt", "auto"}  # these are the defaults
    if "all" in used:  # every integrator that fits: their predictions are in the record
        files = {
            path.split("/")[2].partition(".")[2]
            for record in RECORDED
            for path in record["files"]
            if "/predictions/" in path
        }
        used |= files
    assert choices <= used


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda one: one.update(exit=66), "exit code: expected 0; got 66"),
        (lambda one: one["stderr"].__setitem__(0, "another message"), "stderr: expected '<time> INFO"),
        (lambda one: one["files"].popitem(), "expected to be written or removed; was not touched"),
        (lambda one: one["files"].update(new=[]), "new: not expected to be touched"),
        (lambda one: _replace(one, '"kind":', '"sort":'), '"sort":'),
        (lambda one: _replace(one, '"num_params":18', '"num_params":19'), "18 became 19"),
        (lambda one: _replace(one, "array mean float64", "array mean float32"), "array mean float32"),
    ],
    ids=["exit code", "message", "file gone", "file new", "key", "number", "type"],
)
def test_a_change_is_told_with_its_line_and_its_place(change: object, told: str) -> None:
    (number,) = [place for place, line in enumerate(LINES) if "--name kron" in line.words]
    was = RECORDED[number : number + 1]
    now = copy.deepcopy(was)
    assert differences(was, now, is_strict=False) == []
    change(now[0])  # type: ignore[operator]
    (one, *_) = differences(was, now, is_strict=False)
    assert was[0]["line"] in one
    assert told in one


def _replace(record: Record, old: str, new: str) -> None:
    for texts in record["files"].values():
        assert any(old in text for text in texts)
        texts[:] = [text.replace(old, new) for text in texts]


@pytest.mark.parametrize(
    ("was", "now", "is_same"),
    [
        ("NLL 0.4248", "NLL 0.4249", True),  # one unit of the last printed digit
        ("NLL 0.4248", "NLL 0.4250", False),
        ("240 examples", "241 examples", False),
        ("array mean float64 [2]: 1e-09 1 0.5 0.5", "array mean float64 [2]: 2e-09 1 0.5 0.5", True),
        ("array mean float64 [2]: 1e-09 1 0.5 0.5", "array mean float64 [2]: 1e-09 1 0.5 0.5001", False),
    ],
)
def test_numbers_agree_to_the_tolerance(was: str, now: str, is_same: bool) -> None:
    record = {"line": "bnncli", "exit": 0, "stderr": [], "files": {}}
    told = differences([record | {"stdout": [was]}], [record | {"stdout": [now]}], is_strict=False)
    assert (told == []) is is_same
