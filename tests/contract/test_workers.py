"""Commands in several processes: the same artifacts for any number of them, one voice, one writer, and one end."""

from __future__ import annotations

import hashlib
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli, new_run
from problems.workers import ended, run_processes, run_workers, start_workers

from bnncli.cli import spread
from bnncli.errors import UsageError
from bnncli.inference import mode
from bnncli.options.command import ComputeOptions
from bnncli.system import memory

FITS = {
    "fit-laplace": ("--structure", "full"),
    "fit-laplace/kron": ("--structure", "kron", "--name", "kron"),
    "fit-laplace/loo": ("--structure", "full", "--prior-precision", "loo", "--name", "loo"),
    "fit-laplace/marglik": ("--structure", "diag", "--prior-precision", "marglik", "--name", "diag"),
    "refine": ("--epochs", 1, "--length", 2),
    "refine/batches": ("--epochs", 1, "--batch-size", 16, "--name", "batches"),
    "hmc": ("--chains", 4, "--warmup", 8, "--draws", 8),
    "hmc/examples": ("--chains", 9, "--warmup", 8, "--draws", 8, "--spread", "examples", "--name", "examples"),
    "hmc/chains": ("--chains", 9, "--warmup", 8, "--draws", 8, "--spread", "chains", "--name", "chains"),
    "hmc/nuts": ("--sampler", "nuts", "--chains", 4, "--warmup", 8, "--draws", 8, "--name", "nuts"),
    "fit-vi": ("--epochs", 1),
    "fit-swag": ("--epochs", 4),
    "fit-sghmc": ("--chains", 2, "--epochs", 4, "--draws", 2, "--exploration", 0.5),
    "fit-temperature": (),
}


def problem(num_examples: int, num_features: int = 4) -> dict[str, np.ndarray]:
    """Features of three classes, whose number no number of workers divides."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(3, num_features))
    arrays = {"head_weight": weight.astype(np.float32), "head_bias": np.zeros(3, np.float32)}
    for split, count in (("train", num_examples), ("val", 50)):
        features = generator.normal(size=(count, num_features)).astype(np.float32)
        arrays[f"features_{split}"] = features
        arrays[f"labels_{split}"] = (features @ weight.T + generator.gumbel(size=(count, 3))).argmax(axis=1)
    return arrays


@pytest.mark.parametrize(
    ("size", "num_examples", "lines"),
    [
        pytest.param(2, 211, ("hmc/chains",), id="2"),
        *(
            pytest.param(size, count, lines, id=f"{size} {count}", marks=pytest.mark.long)
            for size, count, lines in (
                (1, 150, ("fit-laplace", "hmc", "hmc/examples")),
                (2, 211, ("hmc/examples",)),
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


SMALL_DEVICES = """
import os
from bnncli.inference import local_covariance, memory, mode
from bnncli.inference import mode
from bnncli.system import panels
panels._WIDTH, panels._LARGE = {"cpu": 5}, 10
mode.MAX_FULL_PRECONDITIONER = 0
memory.has_room_whole = lambda layout, device: False
rows = local_covariance._spread
local_covariance._spread = lambda *a, **k: os.write(2, b"rows are spread ") and rows(*a, **k)
"""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_rows_spread_over_devices_without_room_are_the_covariance_of_one_with_room(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(memory, "_WIDTH", {"cpu": 5})
    monkeypatch.setattr(memory, "_LARGE", 10)
    monkeypatch.setattr(mode, "MAX_FULL_PRECONDITIONER", 0)  # as of any head that has no room
    arrays = problem(150)
    alone, run = (new_run(cli, tmp_path / name, arrays) for name in ("alone", "shared"))
    words = ("--structure", "full", "--prior-precision", 3, "--json")
    done = cli("fit-laplace", alone, *words, "--shards", 64)
    found = run_workers(size, "fit-laplace", run, *words, cwd=tmp_path, before=SMALL_DEVICES)
    assert [one.code for one in found] == [0] * size, found[0].stderr
    assert found[0].json["outputs"][0]["content_digest"] == done.json["outputs"][0]["content_digest"]
    assert all("rows are spread" in one.stderr for one in found)


REPEATS = {
    "2": (2, ("--repeats", 3)),
    "3": (3, ("--repeats", 5, "--estimator", "concrete")),
    "4": (4, ("--repeats", 3, "--estimator", "mnf", "--flow-hidden", 5)),
    "4 one": (4, ("--repeats", 1, "--standardize")),
}


@pytest.mark.parametrize(
    ("size", "words"),
    [pytest.param(*case, id=name, marks=() if name == "2" else pytest.mark.long) for name, case in REPEATS.items()],
)
def test_repeats_of_a_network_are_the_same_for_any_number_of_workers(
    cli: Cli, tmp_path: Path, size: int, words: tuple[object, ...]
) -> None:
    # Layers so wide that each network is a batch of its own.
    check_latent_fits(cli, tmp_path, size, "--hidden", "250,200", "--epochs", 2, *words)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_candidates_for_a_slab_are_the_same_for_any_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    check_latent_fits(cli, tmp_path, size, "--epochs", 2, "--repeats", 2, num_features=3000)


def check_latent_fits(cli: Cli, tmp_path: Path, size: int, *words: object, num_features: int = 4) -> None:
    """Fits of so many workers have the digest of a process alone, and say what there is to say once."""
    alone, run = (new_run(cli, tmp_path / name, problem(211, num_features)) for name in ("alone", "shared"))
    done = cli("fit-lbbnn", alone, *words, "--shards", 64, "--json")
    assert done.code == 0, done.stderr
    first, *others = run_workers(size, "fit-lbbnn", run, *words, "--json", cwd=tmp_path)
    assert first.code == 0, first.stderr
    assert first.json["outputs"][0]["content_digest"] == done.json["outputs"][0]["content_digest"]
    told = [dict(one.json["metrics"], seconds_per_epoch=None) for one in (first, done)]
    assert told[0] == told[1]
    assert first.json["warnings"] == done.json["warnings"]
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_seeds_of_a_network_are_the_same_for_any_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    arrays = problem(70)
    np.savez(tmp_path / "train.npz", x=arrays["features_train"], y=arrays["labels_train"])
    words = (
        "--model",
        "mlp",
        "--model-arg",
        "inputs=4",
        "--model-arg",
        "classes=3",
        "--data",
        f"train=npz:{tmp_path}/train.npz",
    )
    words += ("--epochs", 3, "--seeds", 3, "--learning-rate", 0.01)
    done = cli("train", tmp_path / "alone.safetensors", *words, "--shards", 64, "--json")
    assert done.code == 0, done.stderr
    first, *others = run_workers(size, "train", "shared.safetensors", *words, "--json", cwd=tmp_path)
    assert first.code == 0, first.stderr
    digests = [[output["content_digest"] for output in one.json["outputs"]] for one in (first, done)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)


@pytest.mark.long
def test_repeats_go_on_with_another_number_of_workers(cli: Cli, tmp_path: Path) -> None:
    words = ("--hidden", "250,200", "--epochs", 20, "--repeats", 3, "--save-every", 0)
    whole, run = (new_run(cli, tmp_path / name, problem(211)) for name in ("whole", "parts"))
    started = start_workers(2, ("fit-lbbnn", run, *words), cwd=tmp_path)
    state = tmp_path / "parts.bnn/posteriors/.lbbnn.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)  # as torchrun sends it to all
    started[0].send_signal(signal.SIGTERM)
    first, second = ended(started)
    assert (first.code, second.code, second.stderr) == (143, 143, ""), first.stderr
    assert "continue with: torchrun --nproc-per-node 2 -m bnncli fit-lbbnn" in first.stderr
    refused = cli("fit-lbbnn", run, *words, "--resume")
    assert (refused.code, "it was saved with networks grouped into different batches" in refused.stderr) == (65, True)
    done = run_workers(3, "fit-lbbnn", run, *words, "--resume", "--json", cwd=tmp_path)[0]
    assert (done.code, "resuming" in done.stderr) == (0, True), done.stderr
    expected = cli("fit-lbbnn", whole, *words, "--shards", 64, "--json").json["outputs"][0]["content_digest"]
    assert done.json["outputs"][0]["content_digest"] == expected
    assert not state.exists()


@pytest.mark.long
def test_a_repeat_that_fails_on_another_worker_is_told_once_by_the_first(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    words = ("--repeats", 1, "--hidden", 5, "--learning-rate", 1e30)  # one batch, which is the second worker's
    first, second = run_processes(2, "fit-lbbnn", run, *words, cwd=tmp_path)
    assert (first.code, second.code, second.stdout + second.stderr) == (70, 70, "")
    assert first.stderr.count("error: ") == 1
    assert "error: the bound is not finite in epoch 1" in first.stderr
    assert "1 batch of networks for 2 workers: 1 of the workers wait" in first.stderr
    assert list((tmp_path / "run.bnn/posteriors").glob("*lbbnn*")) == []


@pytest.mark.long
def test_what_is_up_to_date_is_so_for_all_workers_and_errors_are_said_once(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    assert cli("fit-laplace", run, "--prior-precision", 3).code == 0
    first, second = run_workers(2, "fit-laplace", run, "--prior-precision", 3, cwd=tmp_path)
    assert (first.code, second.code, second.stderr) == (0, 0, "")
    assert "up to date" in first.stderr
    first, second = run_processes(2, "fit-laplace", run, "--prior-precision", 4, cwd=tmp_path)
    assert (first.code, second.stdout + second.stderr) == (73, "")
    assert "already exists with other options" in first.stderr
    assert second.code == 73


@pytest.mark.long
def test_a_figure_is_drawn_by_the_first_worker(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    words = ("fit-laplace", run, "--prior-precision", "marglik", "--plot", "search.png", "--json")
    first, second = run_workers(2, *words, cwd=tmp_path)
    assert (first.code, second.code, second.stdout + second.stderr) == (0, 0, "")
    digest = hashlib.sha256((tmp_path / "search.png").read_bytes()).hexdigest()
    assert first.json["outputs"][-1]["content_digest"] == f"sha256:{digest}"


@pytest.mark.parametrize(("local", "here", "given"), [(1, 2, "cuda:1"), (0, 3, None), (2, 3, None)])
def test_each_worker_has_a_gpu_of_its_own_or_all_know_that_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch, local: int, here: int, given: str | None
) -> None:
    told = {"RANK": local, "WORLD_SIZE": here, "MASTER_ADDR": "x", "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(spread, "device_name", lambda device: "cuda:0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with nullcontext() if given else pytest.raises(UsageError, match="3 workers on this machine, which has 2 GPUs"):
        assert spread.own_device(ComputeOptions()).device == given


@pytest.mark.long
def test_a_command_whose_work_is_not_shared_is_done_by_the_first_worker(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    assert cli("fit-laplace", run, "--prior-precision", 3).code == 0
    first, second = run_workers(2, "diagnose", run, cwd=tmp_path)
    assert (first.code, second.code, second.stdout, second.stderr) == (0, 0, "", "")
    assert "diagnose does not run in parallel: worker 0 of 2 does all the work" in first.stderr


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
def test_what_ends_another_worker_alone_is_said_by_the_first(cli: Cli, tmp_path: Path) -> None:
    new_run(cli, tmp_path / "run", problem(70))
    (tmp_path / "elsewhere").mkdir()  # where there is no such run
    started = start_workers(3, ("fit-laplace", "run", "--json"), cwd=tmp_path, elsewhere=tmp_path / "elsewhere")
    first, *others = ended(started)
    assert (first.code, first.json["error"]["message"].partition(": ")[0]) == (66, "worker 2"), first.stderr
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(66, "", "")] * 2


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
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
    assert time.monotonic() - before < (20 if stop is signal.SIGTERM else 60)
    assert started[0].returncode == (143 if stop is signal.SIGTERM else 69), said
    started[1].kill()
    started[1].communicate(timeout=60)
    expected = {
        signal.SIGSTOP: "worker 1 has not responded",
        signal.SIGKILL: "worker 1 stopped without an error",
        signal.SIGTERM: "interrupted by SIGTERM",
    }
    assert expected[stop] in said
    assert "Traceback" not in said
    assert not (tmp_path / "run.bnn/posteriors/hmc.nc").exists()
