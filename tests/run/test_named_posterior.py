"""What is hinted at where a posterior of the name that was asked for is not there: commands that make it."""

from __future__ import annotations

from pathlib import Path

import pytest
from problems.command_line import Cli

ALL = "--layers all"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("refine --base own", "bnncli fit-laplace {} --name own"),
        ("refine --base laplace", "bnncli fit-laplace {}"),
        ("refine --base laplace-all --trust-code", f"bnncli fit-laplace {{}} {ALL} --trust-code"),
        (f"refine {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        (f"refine {ALL} --base own", f"bnncli fit-laplace {{}} {ALL} --name own"),
        ("hmc", "bnncli fit-laplace {}"),
        ("hmc --layers fc --trust-code", "bnncli fit-laplace {} --layers fc --trust-code"),
        ("hmc --base own", "bnncli fit-laplace {} --name own"),
        ("predict --posterior laplace-all", f"bnncli fit-laplace {{}} {ALL}"),
        ("predict --posterior hmc-all --trust-code", f"bnncli hmc {{}} {ALL} --trust-code"),
        ("predict --posterior hmc-al", "did you mean 'hmc'?"),
        ("predict --posterior own", "bnncli status {}"),
        ("diagnose --posterior temperature", "bnncli fit-temperature {}"),
        ("evaluate --posterior laplace", "bnncli fit-laplace {}"),
        ("evaluate --posterior refine", "bnncli predict {} --posterior refine"),
        ("evaluate --posterior refine.mc", "bnncli predict {} --posterior refine"),
        ("evaluate --posterior own", "bnncli status {}"),
        (f"evaluate {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        (f"compare {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        ("prune", "bnncli fit-lbbnn {}"),
        ("fit-temperature --base own", "bnncli fit-laplace {} --name own"),
    ],
)
def test_the_hint_makes_what_is_not_there(cli: Cli, small_run: Path, words: str, hint: str) -> None:
    folder = small_run.with_name("small.bnn")
    (folder / "posteriors" / "laplace.safetensors").unlink()
    for name in ("laplace", "refine"):
        for path in (folder / "predictions").glob(f"{name}.*/*"):
            path.unlink()
    command, *rest = words.split()
    refused = cli(command, small_run, *rest)
    assert (refused.code, refused.stderr.splitlines()[-1]) == (66, f"hint: {hint.format(small_run)}")
