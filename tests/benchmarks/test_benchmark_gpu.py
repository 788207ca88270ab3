"""benchmarks/gpu.py: its parts on a pretend GPU, what it holds against what, and that it fails where something is missed."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's modules can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The exit code and the parts' reports of the script on a pretend GPU, on the smallest cases."""

    def call(part: str, *words: str) -> tuple[int, dict[str, Any]]:
        script, report = str(BENCHMARKS / "gpu.py"), tmp_path / "gpu.json"
        own = ["--pretend", "--quick", "--dir", str(tmp_path), "--json", str(report)]
        monkeypatch.setattr(sys, "argv", [script, "--part", part, *own, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        return int(str(ended.value.code)), json.loads(report.read_text())["parts"]

    return call


def test_every_command_and_member_of_a_family_has_a_line(own_modules: None) -> None:
    from gpu_parts.cases import cases, without_line

    from bnncli import registry
    from bnncli.cli.commands import COMMANDS

    assert without_line(cases()) == []
    assert without_line([]) == sorted({command.name for command in COMMANDS} - {"grid", "reproduce"})
    lines = " ".join(line for case in cases() for line in case.lines)
    for flag, family in (("--flow", "flows"), ("--structure", "curvature")):
        assert all(f"{flag} {name} " in lines for name in registry.names(family))


def test_commands_agree_on_the_cpu_and_on_the_gpu(run: Run) -> None:
    code, parts = run("correctness", "--only", "float32|extract|fit-laplace|predict|verify|integrals")
    met = {row["what"]: row["is_met"] for row in parts["correctness"]["rows"]}
    assert (code, parts["correctness"]["missed"]) == (0, [])
    for end in ("scale_tril", "mode, in posterior standard deviations", "probabilities", "features", "errors"):
        assert [is_met for what, is_met in met.items() if what.endswith(f": {end}")] == [True], end
    assert met["error of a float32 product"]
    assert met["every command has a line"]


def test_a_number_that_differs_on_the_gpu_is_missed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.inference import local_covariance

    ggn = local_covariance.ggn

    def rounded(*words: Any, **options: Any) -> Any:
        parts = ggn(*words, **options)
        return {name: 1.001 * part if part.is_cuda else part for name, part in parts.items()}

    monkeypatch.setattr(local_covariance, "ggn", rounded)
    code, parts = run("correctness", "--only", "extract|fit-laplace")
    assert (code, parts["correctness"]["missed"]) == (1, ["small: fit-laplace --prior-precision 100: scale_tril"])


@pytest.mark.long
def test_content_and_chains_do_not_depend_on_memory_or_interruptions(run: Run) -> None:
    code, parts = run("memory", "--only", "resuming|peak of a full|small: (extract|fit-laplace)|out of memory, fit")
    rows = parts["memory"]["rows"]
    assert (code, parts["memory"]["missed"]) == (0, [])
    for kind in ("twice", "with ballast"):
        assert f"small: fit-laplace --prior-precision 100: {kind}, the same content" in [row["what"] for row in rows]
    assert sum(row["what"].startswith("fit-laplace, 1 MiB free") for row in rows) == 1
    assert "resumed = whole, hmc" in [row["what"] for row in rows]


@pytest.mark.parametrize("captures_nothing", [False, True])
@pytest.mark.parametrize("name", ["affine", "split chains"])
def test_a_graph_that_does_not_step_is_missed(name: str, captures_nothing: bool) -> None:
    from gpu_parts.gpu import open_gpu
    from gpu_parts.graphs import check_graphs
    from gpu_parts.ledger import Ledger

    ledger = Ledger(only=f"graph of {name}")
    with open_gpu(None) as gpu:
        gpu.pretend.captures_nothing = captures_nothing  # type: ignore[attr-defined]
        check_graphs(gpu, ledger, is_quick=True)
    assert bool(ledger.missed) == captures_nothing
    assert len(ledger.rows) >= (1 if captures_nothing else 4)


@pytest.mark.parametrize(
    ("name", "seconds", "missed"), [("NVIDIA H200", 0.051, 2), ("NVIDIA H200", 0.049, 0), ("another", 9.0, 0)]
)
def test_what_is_slower_than_its_limit_is_missed_where_limits_hold(
    name: str, seconds: float, missed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_parts import speed
    from gpu_parts.ledger import Ledger

    monkeypatch.setattr(speed, "best_of", lambda work, device, repeats: (seconds, work()))
    ledger = Ledger(only="wide Hessian")
    speed.measure(torch.device("cpu"), name, ledger, tmp_path, is_quick=True)
    assert len(ledger.missed) == missed
    rows = [row for row in ledger.rows if "full Hessian" in row["what"]]
    assert len(rows) == 2
    for row in rows:
        assert row["facts"]["times_floor"] == pytest.approx(seconds / row["facts"]["floor"])


def test_the_speed_part_is_left_out_on_a_pretend_gpu(run: Run) -> None:
    code, parts = run("speed")
    assert code == 0
    assert [row["text"] for row in parts["speed"]["rows"]] == ["a pretend GPU has no speed"]


def test_what_is_no_number_fails_or_comes_too_late_is_missed() -> None:
    from gpu_parts.ledger import Ledger

    def fail() -> None:
        raise RuntimeError("no such kernel")

    ledger = Ledger()
    ledger.check("a", math.nan, 1.0)
    ledger.check("b", 0.4, 1.1, least=0.5)
    ledger.check("c", 1.0, 1.0, seconds=math.inf)
    ledger.item("d", fail)
    assert ledger.missed == ["a", "b", "d"]
    late = Ledger(seconds=0.0)
    late.item("e", fail)
    assert late.rows[0]["text"] == "not begun: the part's time is over"
    json.dumps([ledger.rows, late.rows], allow_nan=False)


def test_floors_are_bytes_over_bandwidth_or_flops_over_the_peak() -> None:
    from gpu_parts.floors import STATED, is_held, stated_rates
    from machine import Work

    h200 = stated_rates("NVIDIA H200")
    assert h200 is not None
    assert Work(flops32=67e12, bytes=4.8e11).seconds(h200) == pytest.approx(1)
    assert Work(bytes=9.6e12).seconds(h200) == pytest.approx(2)
    assert stated_rates("NVIDIA H100 PCIe") == STATED["H100 PCIe"]
    assert stated_rates("NVIDIA H100 80GB HBM3") == STATED["H100"]
    assert (stated_rates("a pretend one"), is_held("NVIDIA A100-SXM4-80GB")) == (None, False)


def test_numbers_that_differ_by_more_than_rounding_are_told() -> None:
    from gpu_parts.artifacts import document_differences

    document = {"errors": [0.1, 0.2], "exact": {"method": "quadrature"}, "seconds": 1.0}
    for other, apart in (
        ({**document, "seconds": 2.0}, 0.0),
        ({**document, "errors": [0.1, 0.2 + 1.2e-5]}, 1e-5),
        ({**document, "errors": [0.1]}, math.inf),
        ({**document, "exact": {"method": "points"}}, math.inf),
        ({**document, "errors": [0.1, math.nan]}, math.nan),
    ):
        (difference,) = document_differences("integrals", document, other)
        assert difference.value == pytest.approx(apart, nan_ok=True)
        assert (difference.value <= difference.most) == (apart == 0.0)


def test_a_signal_to_a_command_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts import commands

    monkeypatch.setattr(commands, "run_command_line", lambda argv, results: 143)
    with pytest.raises(SystemExit, match="143"):
        commands.run_line("integrals", tmp_path, "cpu")
