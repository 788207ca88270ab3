"""benchmarks/gpu.py: its steps on a pretend GPU, what it holds against what, and that it fails where something is missed."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
    """The exit code and the rows of one step on a pretend GPU, on the smallest cases."""

    def call(step: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
        script, report = str(BENCHMARKS / "gpu.py"), tmp_path / "gpu.jsonl"
        own = ["--pretend", "--quick", "--dir", str(tmp_path), "--json", str(report)]
        monkeypatch.setattr(sys, "argv", [script, "--step", step, *own, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        rows = [json.loads(line) for line in report.read_text().splitlines()]
        assert {row["step"] for row in rows} == {step}
        return int(str(ended.value.code)), rows

    return call


def missed(rows: list[dict[str, Any]]) -> list[str]:
    return [row["what"] for row in rows if row.get("is_met") is False]


def test_every_command_and_member_of_a_family_has_a_line(own_modules: None) -> None:
    from gpu_steps.cases import cases, without_line

    from bnncli import registry
    from bnncli.cli.commands import own_commands

    assert without_line(cases()) == []
    assert without_line([]) == sorted({command.name for command in own_commands()} - {"grid", "reproduce"})
    lines = " ".join(line for case in cases() for line in case.lines)
    for flag, family in (("--flow", "flows"), ("--structure", "curvature")):
        assert all(f"{flag} {name} " in lines for name in registry.names(family))


def test_commands_agree_on_the_cpu_and_on_the_gpu(run: Run) -> None:
    code, rows = run("commands", "--only", "float32|extract|fit-laplace|predict|verify|integrals")
    met = {row["what"]: row["is_met"] for row in rows if "what" in row}
    assert (code, missed(rows)) == (0, [])
    for end in ("scale_tril", "mode, in posterior standard deviations", "probabilities", "features", "errors"):
        assert [is_met for what, is_met in met.items() if what.endswith(f": {end}")] == [True], end
    assert met["error of a float32 product"]
    assert met["every command has a line"]
    assert rows[0]["schema"] == "bnncli.benchmark.gpu/2"
    assert rows[-1]["num_missed"] == 0


def test_a_number_that_differs_on_the_gpu_is_missed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.inference import mode

    ggn = mode.ggn

    def rounded(*words: Any, **options: Any) -> Any:
        parts = ggn(*words, **options)
        return {name: 1.001 * part if part.is_cuda else part for name, part in parts.items()}

    monkeypatch.setattr(mode, "ggn", rounded)
    code, rows = run("commands", "--only", "extract|fit-laplace")
    assert (code, missed(rows)) == (1, ["small: fit-laplace --prior-precision 100: scale_tril"])


def test_a_step_that_dies_or_hangs_is_missed(run: Run, monkeypatch: pytest.MonkeyPatch, own_modules: None) -> None:
    from gpu_steps import wide

    monkeypatch.setattr(wide, "run", lambda bench: os.kill(os.getpid(), signal.SIGKILL))
    assert run("wide")[0] == 1
    monkeypatch.setattr(wide, "run", lambda bench: time.sleep(60))
    monkeypatch.setattr("gpu_steps.bench.GRACE", 0.5)
    start = time.monotonic()
    assert run("wide", "--seconds", "0.5")[0] == 1
    assert time.monotonic() - start < 20


NIGHTLY = ("lenet-speed", "lbbnn", "wide", "imagenet", "network")


@pytest.mark.long
@pytest.mark.parametrize(
    "step", ["smoke", "torchrun", *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_each_step_runs_on_the_pretend_device(run: Run, step: str) -> None:
    code, rows = run(step)
    assert (code, missed(rows)) == (0, [])
    assert len(rows) > 2  # a header, an end, and what it looked at


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "only", "name"),
    [
        ("determinism", "extract|fit-laplace", "twice"),
        ("faults", "out of memory, small head: fit-l", "small: fit-laplace, 1 MiB free"),
        ("graphs", "resuming|affine", "resumed = whole, hmc"),
    ],
)
def test_content_and_chains_do_not_depend_on_memory_or_interruptions(run: Run, step: str, only: str, name: str) -> None:
    code, rows = run(step, "--only", only)
    assert (code, missed(rows)) == (0, [])
    assert any(name in row.get("what", "") for row in rows)


@pytest.mark.parametrize("captures_nothing", [False, True])
@pytest.mark.parametrize("name", ["affine", "split chains"])
def test_a_graph_that_does_not_step_is_missed(name: str, captures_nothing: bool, tmp_path: Path) -> None:
    from gpu_steps import graphs
    from gpu_steps.bench import Bench
    from gpu_steps.device import open_gpu
    from gpu_steps.ledger import Ledger

    ledger = Ledger(only=f"graph of {name}")
    with open_gpu(None) as gpu:
        gpu.pretend.captures_nothing = captures_nothing  # type: ignore[attr-defined]
        graphs.run(Bench(gpu, ledger, tmp_path, True))
    assert bool(ledger.missed) == captures_nothing
    assert len(ledger.rows) >= (1 if captures_nothing else 4)


@pytest.mark.parametrize(
    ("seconds", "limits_hold", "is_met"), [(0.051, True, False), (0.049, True, True), (9.0, False, None)]
)
def test_what_is_slower_than_its_limit_is_missed_where_limits_hold(
    seconds: float, limits_hold: bool, is_met: bool | None, tmp_path: Path
) -> None:
    from gpu_steps.bench import Bench, Clock
    from gpu_steps.floors import STATED
    from gpu_steps.ledger import Ledger
    from machine import Work

    ledger = Ledger()
    bench = Bench(SimpleNamespace(device=torch.device("cpu")), ledger, tmp_path, False)  # type: ignore[arg-type]
    Clock(bench, STATED["H100"], limits_hold).tell("a job", seconds, Work(bytes=3.35e9), most=0.05)
    (row,) = ledger.rows
    assert row["is_met"] is is_met
    assert row["facts"]["times_floor"] == pytest.approx(seconds / 1e-3)


def test_what_is_no_number_fails_or_comes_too_late_is_missed() -> None:
    from gpu_steps.ledger import Ledger

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
    assert late.rows[0]["text"] == "not begun: the step's time is over"
    json.dumps([ledger.rows, late.rows], allow_nan=False)


def test_floors_are_bytes_over_bandwidth_or_flops_over_the_peak() -> None:
    from gpu_steps.floors import STATED, is_held, stated_rates
    from machine import Work

    h200 = stated_rates("NVIDIA H200")
    assert h200 is not None
    assert Work(flops32=67e12, bytes=4.8e11).seconds(h200) == pytest.approx(1)
    assert Work(bytes=9.6e12).seconds(h200) == pytest.approx(2)
    assert stated_rates("NVIDIA H100 PCIe") == STATED["H100 PCIe"]
    assert stated_rates("NVIDIA H100 80GB HBM3") == STATED["H100"]
    assert (stated_rates("a pretend one"), is_held("NVIDIA A100-SXM4-80GB")) == (None, False)


def test_numbers_that_differ_by_more_than_rounding_are_told() -> None:
    from gpu_steps.artifacts import document_differences

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
    from gpu_steps import lines

    monkeypatch.setattr(lines, "run_command_line", lambda argv, results: 143)
    with pytest.raises(SystemExit, match="143"):
        lines.run_line("integrals", tmp_path, "cpu")
