"""acquire: ids of a pool, by rules that its predictions give; excluded ones, tables, refusals."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli, Invocation

from bnncli.artifacts.predictions import read_predictions


def acquire(cli: Cli, run: Path, *words: object, code: int = 0) -> Invocation:
    return cli("acquire", run, "--pool", "test", *words).expect(code)


@pytest.mark.parametrize("rule", ["bald", "entropy", "margin"])
def test_the_highest_scores_of_what_predict_gives_are_chosen(cli: Cli, small_run: Path, rule: str) -> None:
    done = acquire(cli, small_run, "--by", rule, "--batch", 5, "--json").json
    content = read_predictions(small_run.with_name("small.bnn") / "predictions" / "laplace.mc" / "test.h5")
    two = np.sort(content.probs, axis=1)[:, -2:]
    scores = {"bald": content.mutual_info, "entropy": content.entropy, "margin": two[:, 0] - two[:, 1]}[rule]
    order = np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")[:5]
    assert [row["sample_id"] for row in done["rows"]] == content.sample_id[order].tolist()
    assert [row["score"] for row in done["rows"]] == pytest.approx(np.asarray(scores)[order].tolist(), rel=1e-4)
    assert (done["by"], done["posterior"], done["integrator"]) == (rule, "laplace", "mc")


def test_ids_are_lines_and_excluded_ones_are_not_chosen_again(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    first = acquire(cli, small_run, "--batch", 4).stdout.split()
    done = tmp_path / "done.txt"
    done.write_text("\n".join(first) + "\n")
    second = acquire(cli, small_run, "--batch", 4, "--exclude", done).stdout.split()
    assert acquire(cli, small_run, "--batch", 8).stdout.split() == [*first, *second]
    done.write_text("absent\n")
    assert "'absent'" in acquire(cli, small_run, "--exclude", done, code=65).stderr


def test_batchbald_and_random_are_seeded_and_choose_none_twice(cli: Cli, small_run: Path) -> None:
    for rule in ("batchbald", "random"):
        words = ("--by", rule, "--batch", 12)
        first, again = (acquire(cli, small_run, *words).stdout for _ in range(2))
        assert first == again
        assert len({*first.split()}) == 12
    assert acquire(cli, small_run, "--by", "random", "--seed", 1, "--batch", 12).stdout != first
    gains = [row["score"] for row in acquire(cli, small_run, "--by", "batchbald", "--batch", 6, "--json").json["rows"]]
    assert gains == sorted(gains, reverse=True)


def test_the_table_has_what_was_chosen(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    table = tmp_path / "next.csv"
    shown = acquire(cli, small_run, "--batch", 3, "--table", table, "--json").json["rows"]
    rows = list(csv.DictReader(io.StringIO(table.read_bytes().decode())))
    assert [(row["rank"], row["sample_id"]) for row in rows] == [
        (str(row["rank"]), str(row["sample_id"])) for row in shown
    ]
    acquire(cli, small_run, "--batch", 2, "--table", table)
    table.write_text("mine")
    acquire(cli, small_run, "--batch", 2, "--table", table, code=73)
    assert table.read_text() == "mine"
    acquire(cli, small_run, "--batch", 2, "--table", table, "--force")


def test_what_cannot_be_is_refused_in_a_line(cli: Cli, small_run: Path) -> None:
    assert "--by bald needs draws" in acquire(cli, small_run, "--posterior", "map", code=2).stderr
    assert "you asked for --batch 1,000,000" in acquire(cli, small_run, "--batch", 10**6, code=65).stderr
    cli("acquire", small_run, "--pool", "absent").expect(66)
