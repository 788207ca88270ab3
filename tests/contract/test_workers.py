"""Commands in several processes: the same artifacts for any number of them, one voice, one writer, and one end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli, new_run
from problems.workers import ended, run_workers, start_workers

FITS = {
    "fit-laplace": ("--structure", "full"),
    "fit-laplace/kron": ("--structure", "kron", "--name", "kron"),
    "fit-laplace/marglik": ("--structure", "diag", "--prior-precision", "marglik", "--name", "diag"),
    "refine": ("--epochs", 1, "--length", 2),
    "refine/batches": ("--epochs", 1, "--batch-size", 16, "--name", "batches"),
    "hmc": ("--chains", 4, "--warmup", 8, "--draws", 8),
    "hmc/nuts": ("--sampler", "nuts", "--chains", 4, "--warmup", 8, "--draws", 8, "--name", "nuts"),
    "fit-vi": ("--epochs", 1),
    "fit-swag": ("--epochs", 4),
    "fit-sghmc": ("--chains", 2, "--epochs", 4, "--draws", 2, "--exploration", 0.5),
    "fit-temperature": (),
}


def problem(num_examples: int) -> dict[str, np.ndarray]:
    """Features of three classes, whose number no number of workers divides."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(3, 4))
    arrays = {"head_weight": weight.astype(np.float32), "head_bias": np.zeros(3, np.float32)}
    for split, count in (("train", num_examples), ("val", 50)):
        features = generator.normal(size=(count, 4)).astype(np.float32)
        arrays[f"features_{split}"] = features
        arrays[f"labels_{split}"] = (features @ weight.T + generator.gumbel(size=(count, 3))).argmax(axis=1)
    return arrays


@pytest.mark.parametrize(
    ("size", "num_examples", "lines"),
    [
        pytest.param(2, 211, ("hmc",), id="2"),
        *(
            pytest.param(size, count, lines, id=f"{size} {count}", marks=pytest.mark.long)
            for size, count, lines in (
                (1, 150, ("fit-laplace", "hmc")),
                (3, 150, tuple(FITS)),
                (4, 5, ("refine", "hmc")),
            )
        ),
    ],
)
def test_digests_are_equal_for_any_number_of_workers(
    cli: Cli, tmp_path: Path, size: int, num_examples: int, lines: tuple[str, ...]
) -> None:
    arrays = problem(num_examples)
    alone, run = (new_run(cli, tmp_path / name, arrays) for name in ("alone", "shared"))
    if "fit-laplace" not in lines:
        lines = ("fit-laplace", *lines)
    for line in lines:
        command, words = line.partition("/")[0], FITS[line]
        done = cli(command, alone, *words, "--shards", 64, "--json")
        assert done.code == 0, done.stderr
        if line == "fit-laplace" and len(lines) == 2:  # what the other needs
            assert cli(command, run, *words, "--shards", 64).code == 0
            continue
        first, *others = run_workers(size, command, run, *words, "--json", cwd=tmp_path)
        assert first.code == 0, first.stderr
        assert first.json["outputs"][0]["content_digest"] == done.json["outputs"][0]["content_digest"], line
        assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)
    assert cli("verify", tmp_path / "shared.bnn").code == 0
    assert [path.name for path in (tmp_path / "shared.bnn/posteriors").iterdir() if path.name.startswith(".")] == []


@pytest.mark.long
def test_what_is_up_to_date_is_so_for_all_workers_and_errors_are_said_once(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    assert cli("fit-laplace", run, "--prior-precision", 3).code == 0
    first, second = run_workers(2, "fit-laplace", run, "--prior-precision", 3, cwd=tmp_path)
    assert (first.code, second.code, second.stderr) == (0, 0, "")
    assert "up to date" in first.stderr
    first, second = run_workers(2, "fit-laplace", run, "--prior-precision", 4, cwd=tmp_path)
    assert (first.code, second.stdout + second.stderr) == (73, "")
    assert "exists and was made with other options" in first.stderr
    assert second.code != 0


@pytest.mark.long
def test_a_command_whose_work_is_not_shared_is_done_by_the_first_worker(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    assert cli("fit-laplace", run, "--prior-precision", 3).code == 0
    first, second = run_workers(2, "predict", run, cwd=tmp_path)
    assert (first.code, second.code, second.stdout, second.stderr) == (0, 0, "", "")
    assert "predict is not shared out among workers: the first of 2 does all of it" in first.stderr


@pytest.mark.long
@pytest.mark.parametrize("size", [3])
def test_an_interrupted_sampler_goes_on_with_another_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    words = ("--chains", 4, "--warmup", 20, "--draws", 150, "--save-every", 0)
    runs = [new_run(cli, tmp_path / name, problem(211)) for name in ("whole", "parts")]
    for run in runs:
        assert cli("fit-laplace", run, "--prior-precision", 3).code == 0
    whole = cli("hmc", runs[0], *words, "--shards", 64, "--json").json["outputs"][0]["content_digest"]
    started = start_workers(2, ("hmc", runs[1], *words), cwd=tmp_path)
    state = tmp_path / "parts.bnn/posteriors/.hmc.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.05)
    for one in started:
        one.send_signal(signal.SIGTERM)
    first, second = ended(started)
    assert first.code == 128 + signal.SIGTERM, first.stderr
    assert "--resume" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")
    assert second.code != 0
    done = run_workers(size, "hmc", runs[1], *words, "--resume", "--json", cwd=tmp_path)[0]
    assert done.code == 0, done.stderr
    assert done.json["outputs"][0]["content_digest"] == whole


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_hangs_or_is_killed_ends_all(cli: Cli, tmp_path: Path, stop: signal.Signals) -> None:
    run = new_run(cli, tmp_path / "run", problem(211))
    assert cli("fit-laplace", run, "--prior-precision", 3).code == 0
    words = ("hmc", run, "--chains", 4, "--warmup", 50, "--draws", 100_000, "--save-every", 0)
    started = start_workers(2, words, cwd=tmp_path)
    state = tmp_path / "run.bnn/posteriors/.hmc.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.05)
    started[1].send_signal(stop)
    before = time.monotonic()
    said = started[0].communicate(timeout=120)[1]
    assert time.monotonic() - before < 60
    assert started[0].returncode == 69, said
    started[1].kill()
    started[1].communicate(timeout=60)
    expected = "worker 1 has given no sign of life" if stop is signal.SIGSTOP else "has lost the others"
    assert expected in said
    assert "Traceback" not in said
    assert not (tmp_path / "run.bnn/posteriors/hmc.nc").exists()
