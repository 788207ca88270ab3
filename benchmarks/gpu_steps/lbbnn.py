"""Step *lbbnn*: epochs of latent binary networks of MNIST's size, and whether mnf's bound is the CPU's within its own noise."""

from __future__ import annotations

import math
import shutil
from itertools import pairwise

from gpu_steps.bench import Bench, Clock
from gpu_steps.cases import ESTIMATORS
from gpu_steps.heads import examples, latent_model
from gpu_steps.lines import run_line
from machine import Work, timed

from bnncli.artifacts.posteriors import read_posterior
from bnncli.commands.demo import fixture_path
from bnncli.latent.fit import EstimatorSettings, History, Plan, fit_latent
from bnncli.numerics.random import stream

SIZES, QUICK_SIZES = (784, 400, 600, 10), (20, 10, 3)
NUM_EXAMPLES, BATCH = 60_000, 100
EPOCH_LIMITS = {"lrt": 0.35}  # seconds
REPEATS = 24
STANDARD_ERRORS = 4.0


def run(bench: Bench) -> None:
    """Time an epoch of each estimator, then compare bounds."""
    clock = bench.clock()
    for estimator in ESTIMATORS:
        bench.ledger.item(f"epoch of {estimator}", _time_epoch, clock, estimator)
    bench.ledger.item("mnf's bound on CPU and GPU", _compare_bounds, bench)


def _time_epoch(clock: Clock, estimator: str) -> None:
    """Of three epochs what the last two add, an epoch: captures are left out."""
    sizes, count = (QUICK_SIZES, 400) if clock.bench.is_quick else (SIZES, NUM_EXAMPLES)
    features, labels = examples(count, sizes[0], sizes[-1], clock.device)

    def epochs(number: int) -> float:
        model = latent_model(sizes, 1, estimator, clock.device)
        plan = Plan(epochs=number, batch_size=BATCH, learning_rate=1e-3, settings=EstimatorSettings(estimator))
        return timed(
            lambda: fit_latent(model, features, labels, plan, generator=stream(0, "bench/lbbnn")), clock.device
        )[0]

    epochs(1)
    seconds = max(1e-9, epochs(3) - epochs(1)) / 2
    weights = sum(a * b for a, b in pairwise(sizes))
    # Two products forward and four backward an example; a step reads or writes three factors, their gradients and Adam's
    # two moments, 20 numbers a weight.
    work = Work(flops32=12.0 * weights * count, bytes=80.0 * weights * -(-count // BATCH))
    name = f"fit-lbbnn {estimator}, an epoch of {count} in {'-'.join(map(str, sizes))}"
    clock.tell(name, seconds, work, most=EPOCH_LIMITS.get(estimator))


def _compare_bounds(bench: Bench) -> None:
    """Compare the bounds of the last quarter of the epochs by how they scatter over the repeats."""
    repeats, epochs = (3, 4) if bench.is_quick else (REPEATS, 60)
    rows = {"train": 200, "val": 50} if bench.is_quick else {"train": 2000, "val": 500}
    data = " ".join(f"--data {split}=npz:{fixture_path(f'{split}.npz')}@{count}" for split, count in rows.items())
    shutil.copy(fixture_path("lenet5-fmnist.pt"), bench.folder / "run")
    lines = [f"extract-features FOLDER/run --model lenet5 {data}"]
    # One slab: the search for it, by few val examples, takes another one for other noise, and 100 nats lie between them.
    fit = f"fit-lbbnn FOLDER/run --estimator mnf --slab-sd 0.25 --repeats {repeats} --epochs {epochs}"
    devices = {"cpu": "cpu", "gpu": bench.gpu.name}
    found = {}
    for name, device in devices.items():
        for line in [*lines, f"{fit} --name {name}"]:
            done = run_line(line, bench.folder, device if "fit-lbbnn" in line else "cpu")
            if done.code != 0:
                raise RuntimeError(done.failure)
        tensors, header = read_posterior(bench.folder / f"run.bnn/posteriors/{name}.safetensors")
        bound = History.from_tensors(tensors).bound()  # (E, R)
        mean = bound[-max(1, len(bound) // 4) :].mean(dim=0)
        found[name] = float(mean.mean()), float(mean.std()) / math.sqrt(len(mean)), header.meta["metrics"]["bound"]
    (cpu, cpu_error, cpu_end), (gpu, gpu_error, gpu_end) = found["cpu"], found["gpu"]
    error = math.hypot(cpu_error, gpu_error)
    bench.ledger.check("mnf, bound while training, GPU less CPU, in standard errors", abs(gpu - cpu) / error,
                       STANDARD_ERRORS, cpu=cpu, gpu=gpu, standard_error=error)  # fmt: skip
    ends = math.hypot(cpu_end["standard_error"], gpu_end["standard_error"])
    bench.ledger.check("mnf, bound at the end, GPU less CPU, in standard errors", abs(gpu_end["value"] - cpu_end["value"]) / ends,
                       STANDARD_ERRORS, cpu=cpu_end["value"], gpu=gpu_end["value"], standard_error=ends)  # fmt: skip
