"""Commands as methods of an opened run."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from problems.command_line import Cli, file_of

import bnncli
from bnncli.api.run import OpenedRun
from bnncli.artifacts.files import read_header
from bnncli.errors import CheckFailed, UsageError
from bnncli.system import signals
from bnncli.system.signals import BudgetSpent


def test_a_method_makes_what_the_command_makes(small_run: Path, cli: Cli) -> None:
    run = bnncli.open(small_run, seed=3)
    done = run.refine(epochs=1, length=2, name="python", prior_precision=10)
    cli("refine", small_run, "--epochs", 1, "--length", 2, "--name", "shell", "--prior-precision", 10, "--seed", 3)
    digests = {read_header(file_of(small_run, name)).content_digest for name in ("python", "shell")}
    assert len(digests) == 1
    assert done.to_dict()["outputs"][0]["content_digest"] in digests
    assert run.posterior("python").method == "refine"


def test_a_result_is_the_document_and_the_table_of_the_command(small_run: Path, cli: Cli) -> None:
    done = bnncli.open(small_run).evaluate(split="test", posterior=["laplace", "hmc"], bootstrap=20)
    words = ("evaluate", small_run, "--split", "test", "--posterior", "laplace", "--posterior", "hmc")
    expected = cli(*words, "--json").json
    assert {**done.to_dict(), "seconds": 0} == {**expected, "seconds": 0}
    frame, rows = done.to_pandas(), done.to_dict()["rows"]
    assert frame["posterior"].tolist() == ["laplace", "hmc"]
    nlls = [one["value"] for row in rows for one in row["metrics"] if one["name"] == "nll"]
    assert frame["NLL"].tolist() == pytest.approx(nlls, abs=1e-4)
    assert all(f"<td>{name}</td>" in done._repr_html_() for name in ("laplace", "hmc"))
    with pytest.raises(UsageError, match="table: evaluate has 1 tables; got 1"):
        done.to_pandas(1)


@pytest.mark.parametrize(
    ("options", "message", "note"),
    [
        ({"structre": "kron"}, "fit_laplace: unexpected keyword 'structre'", "did you mean 'structure'?"),
        ({"structure": "kro"}, "structure: expected one of auto, full, .*; got 'kro'", "did you mean 'kron'?"),
        ({"force": "yes"}, "force: expected True or False; got 'yes'", None),
        ({"epochs": 1.5}, "fit_laplace: unexpected keyword 'epochs'", "see the options of bnncli fit-laplace"),
    ],
)
def test_a_wrong_keyword_is_one_clear_error(
    finished_run: Path, options: dict[str, object], message: str, note: str | None
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        bnncli.open(finished_run).fit_laplace(**options)
    assert note is None or note in caught.value.__notes__[0]


def test_a_negative_verdict_is_raised(small_run: Path) -> None:
    with pytest.raises(CheckFailed, match="nll"):
        bnncli.open(small_run).evaluate(assert_="laplace.nll<=0.001", bootstrap=20)


def test_a_signature_names_the_options() -> None:
    found = inspect.signature(OpenedRun.fit_laplace).parameters
    assert {"structure", "prior_precision", "force", "progress"} <= found.keys()
    assert not {"json", "run_dir", "threads"} & found.keys()
    assert "structure: " in str(OpenedRun.fit_laplace.__doc__)


def test_a_time_limit_ends_a_command(small_run: Path) -> None:
    with signals.time_limit(0.0), pytest.raises(BudgetSpent):
        bnncli.open(small_run).refine(name="other", epochs=5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
def test_predictions_are_those_that_auto_recommends(small_run: Path) -> None:
    run = bnncli.open(small_run)
    features = run.split("test").features
    assert run.predict(features).posterior == "laplace"
    rows = run.auto(criterion="nll").to_dict()["rows"]
    best = next(row for row in rows if row["is_recommended"])
    found = run.predict(features)
    assert (found.posterior, found.integrator) == (best["posterior"], best["integrator"])
    assert found.posterior != "laplace"
