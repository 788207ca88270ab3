"""A latent binary network's steps beside those of a plain dense network of the same sizes: seconds an epoch, and their ratio.

The dense network is a chain of torch.nn.Linear with ReLU, trained with fused Adam on the same batches. Steps are timed one by
one after a warm-up, turn by turn with the other networks; an epoch is the median of its steps, times the
steps of an epoch of --examples. Published seconds an epoch: Skaaret-Lund (2022), section 5.1, for 784-400-600-10, batches of 100 of
60,000 examples, on a GeForce RTX 2080 Ti. Prints a table and writes JSON.

    python benchmarks/lbbnn.py --sizes 784,400,600,10 --batch-size 100 --steps 200 --out lbbnn.json
    python benchmarks/lbbnn.py --data train.npz --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is imported

import machine
import numpy as np
import torch
from torch import Tensor, nn

from bnncli.errors import BnnError, UsageError
from bnncli.latent.factors import initial_factors, initial_model
from bnncli.latent.fit import EstimatorSettings, Plan, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.numerics.random import stream
from bnncli.parameters.layouts import NetworkLayout
from bnncli.system.devices import configure_torch, resolve_device

SCHEMA = "bnncli.benchmark.lbbnn/1"
PUBLISHED = {"concrete": 20.0, "lrt": 6.0, "mnf": 30.0}
PUBLISHED_CASE = ((784, 400, 600, 10), 100, 60_000)
ROUNDS = 5  # turns that the steps are divided into
_WARM_UP = 10  # steps of each turn, not timed: memory, and on a GPU the capture of the graph
Row = dict[str, Any]
Data = tuple[Tensor, Tensor]


def main() -> None:
    """Measure, print, write."""
    arguments = _parse()
    configure_torch(threads=None, deterministic=False)
    try:
        device = resolve_device(arguments.device)
        layout = NetworkLayout(arguments.sizes)
        data = _data(arguments, layout, device)
        rows = list(_measure(arguments, layout, data))
    except (BnnError, ValueError) as error:
        sys.exit(f"lbbnn.py: {error}")
    print("\n".join(_table(rows, arguments, device)))
    report = {"schema": SCHEMA, "is_quick": arguments.quick, "machine": machine.describe(device),
              "sizes": list(arguments.sizes), "batch_size": arguments.batch_size, "steps": arguments.steps,
              "examples": arguments.examples, "data": "given" if arguments.data else "synthetic", "rows": rows}  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _data(arguments: argparse.Namespace, layout: NetworkLayout, device: torch.device) -> Data:
    """Inputs (n, D) and labels of one turn's steps, warm-up included."""
    count = arguments.batch_size * (_WARM_UP + -(-arguments.steps // ROUNDS))
    if arguments.data is None:
        generator = stream(0, "bench/lbbnn/data")
        features = torch.rand(count, layout.num_features, generator=generator)
        labels = torch.randint(0, layout.num_classes, (count,), generator=generator)
        return features.to(device), labels.to(device)
    with np.load(arguments.data) as arrays:
        given, classes = arrays["features_train"], arrays["labels_train"]
    if given.shape[1] != layout.num_features or classes.max() >= layout.num_classes:
        raise UsageError(f"--data: {given.shape[1]} inputs and labels to {classes.max()} do not fit --sizes")
    rows = np.arange(count) % len(given)
    return torch.from_numpy(given[rows]).float().to(device), torch.from_numpy(classes[rows]).long().to(device)


def _measure(arguments: argparse.Namespace, layout: NetworkLayout, data: Data) -> Iterator[Row]:
    """A row for each network, dense first; turns alternate, so that a machine that slows down slows all."""
    jobs: dict[str, Callable[[], list[float]]] = {"dense": lambda: _dense(layout, data, arguments.batch_size)}
    for estimator in ("lrt", "mnf", "concrete"):
        jobs[estimator] = lambda estimator=estimator: _latent(estimator, layout, data, arguments.batch_size)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            times[name] += job()
    num_steps = -(-arguments.examples // arguments.batch_size)
    is_published = (arguments.sizes, arguments.batch_size, arguments.examples) == PUBLISHED_CASE
    dense = statistics.median(times["dense"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        quarters = statistics.quantiles(seconds, n=4)
        yield {"network": name, "seconds_per_step": median, "quartiles": [quarters[0], quarters[2]],
               "steps_timed": len(seconds), "seconds_per_epoch": num_steps * median, "steps_per_epoch": num_steps,
               "ratio_to_dense": median / dense,
               "published_seconds_per_epoch": PUBLISHED.get(name) if is_published else None}  # fmt: skip


class _Clock:
    """Seconds of each step after the warm-up, as the fit's progress tells them; on a GPU by its own events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks = [self._mark()]

    def task(self, name: str, total: int) -> _Clock:
        """Itself."""
        return self

    def warn(self, text: str) -> None:
        """A line: the seconds are not what they could be."""
        print(f"warning: {text}")

    def advance(self, amount: int = 1, note: str = "") -> None:
        """A step is done, or none was before a fit."""
        if amount:
            self.marks.append(self._mark())

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def seconds(self) -> list[float]:
        """Of each step."""
        machine.synchronize(self.device)
        pairs = list(pairwise(self.marks))[_WARM_UP:]
        if self.device.type == "cuda":
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


def _latent(estimator: str, layout: NetworkLayout, data: Data, batch_size: int) -> list[float]:
    features, labels = data
    device, generator = features.device, stream(0, f"bench/lbbnn/{estimator}")
    factors = initial_factors(layout, 1, generator, device=device)
    multipliers = (
        [initial_model(n, 1, generator, device=device) for _, n in layout.shapes] if estimator == "mnf" else []
    )
    prior = SpikeAndSlab.constant(layout.num_layers).to(device)
    model = LatentModel(layout, factors, prior, tuple(multipliers))
    plan = Plan(epochs=1, batch_size=batch_size, learning_rate=1e-4, settings=EstimatorSettings(estimator))
    clock = _Clock(device)
    fit_latent(model, features, labels, plan, generator=generator, progress=clock)
    return clock.seconds


def _dense(layout: NetworkLayout, data: Data, batch_size: int) -> list[float]:
    """Plain training: shuffled batches, cross entropy, Adam."""
    features, labels = data
    device = features.device
    layers: list[nn.Module] = []
    for outputs, inputs in layout.shapes:
        layers += [nn.ReLU()] * bool(layers) + [nn.Linear(inputs, outputs)]
    network = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, fused=True)
    clock = _Clock(device)
    for index in torch.randperm(len(features), generator=stream(0, "bench/lbbnn/dense")).to(device).split(batch_size):
        logits = network(features.index_select(0, index))
        target = labels.index_select(0, index)
        if layout.num_outputs == 1:
            loss = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], target.float())
        else:
            loss = nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        clock.advance()
    return clock.seconds


def _table(rows: list[Row], arguments: argparse.Namespace, device: torch.device) -> Iterator[str]:
    described = machine.describe(device)
    sizes = "-".join(map(str, arguments.sizes))
    yield (
        f"{sizes}, batches of {arguments.batch_size}, {'given' if arguments.data else 'synthetic'} data; "
        f"{described['gpu'] or described['platform']}, {described['threads']} threads, load {described['load_average'][0]:.1f}"
    )
    yield (
        f"{'network':<10}{'ms a step':>10}{'quartiles':>16}{'s an epoch':>12}{'x dense':>9}{'published s an epoch':>22}"
    )
    for row in rows:
        low, high = (1e3 * value for value in row["quartiles"])
        published = row["published_seconds_per_epoch"]
        yield (
            f"{row['network']:<10}{1e3 * row['seconds_per_step']:>10.3g}{f'{low:.3g} - {high:.3g}':>16}"
            f"{row['seconds_per_epoch']:>12.3g}{row['ratio_to_dense']:>9.2f}{'-' if published is None else f'{published:g}':>22}"
        )
    yield (
        f"an epoch is {rows[0]['steps_per_epoch']} steps of {arguments.examples} examples: medians of {rows[0]['steps_timed']} steps, "
        "scaled; published: Skaaret-Lund (2022), GeForce RTX 2080 Ti"
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=_sizes, default=PUBLISHED_CASE[0], help="inputs, hidden sizes, outputs, joined by commas"
    )
    parser.add_argument("--batch-size", type=int, default=PUBLISHED_CASE[1], help="examples a step")
    parser.add_argument(
        "--examples", type=int, default=PUBLISHED_CASE[2], help="of an epoch, to which the time is scaled"
    )
    parser.add_argument("--steps", type=int, default=200, help="to time, of each network")
    parser.add_argument(
        "--data", type=Path, help="npz with features_train and labels_train; synthetic data when not given"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, help="write the report to this file as JSON")
    parser.add_argument("--quick", action="store_true", help="15 steps, to try the script; not to quote")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = 15
    if min(arguments.steps, arguments.batch_size, arguments.examples) < 1:
        parser.error("--steps, --batch-size and --examples start at 1")
    return arguments


if __name__ == "__main__":
    main()
