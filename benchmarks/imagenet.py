"""A head of ImageNet's size as its user goes: features from a stated generator, then each step a command of its own.

Examples are h = mu_y + e along the axes of a random rotation: e has standard deviations s_i = i^-1/2 (variances fall as 1/i,
as of the last layers of trained networks), class means mu_k those of c s_i i^-.35, where c is such that any number of classes
overlaps about as a thousand do. Features are ReLU(a (h + 2 sd)), float16. The head is trained by Adam without decay, for three epochs,
3,000 steps at least.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import machine
import numpy as np
import torch
from machine import Work

from bnncli.parameters.layouts import HeadLayout

N, D, K, M = 1_280_000, 2048, 1000, 25_000
CHAINS, SAMPLES = 16, 200
CLOSED = ("plug-in", "probit", "mean-field", "bridge")
_BLOCK = 8192
_MEANS_FALL = 0.35
_EPOCHS, _STEPS, _BATCH = 3, 3000, 512  # of training: epochs, and steps at least
Row = dict[str, Any]


class Scale(NamedTuple):
    """Of one run: examples to train by, to validate and to test by, and the head."""

    num_examples: int
    num_held_out: int
    layout: HeadLayout

    @classmethod
    def of(cls, fraction: float, num_features: int, num_held_out: int | None) -> Scale:
        """N and K at this fraction, D as it is."""
        layout = HeadLayout(max(2, round(K * fraction)), num_features)
        return cls(int(N * fraction), num_held_out or max(1000, int(M * fraction)), layout)

    @property
    def text(self) -> str:
        return f"N = {self.num_examples:,}, D = {self.layout.num_features:,}, K = {self.layout.num_outputs:,}"


class Step(NamedTuple):
    """A command, and the least that it must do, by what it has reported."""

    name: str
    words: tuple[str, ...]
    draws: int = 1  # that are taken at a time, for which features are read once
    structure: str | None = None


def measure(
    fractions: list[float],
    rates: machine.Rates,
    *,
    device: torch.device,
    folder: Path | None,
    skip: tuple[str, ...],
    num_features: int = D,
    num_held_out: int | None = None,
) -> list[Row]:
    """One row for each step at each fraction, printed as it comes."""
    rows: list[Row] = []
    for fraction in sorted(fractions):
        scale = Scale.of(fraction, num_features, num_held_out)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            print(f"\n{scale.text}, P = {scale.layout.num_params:,}")
            print(f"{'step':<22}{'seconds':>9}{'cpu s':>9}{'peak':>10}{'features read':>15}{'floor s':>9}{'growth':>8}")
            for row in _steps(scale, Path(place), device=device, rates=rates, skip=skip):
                row["fraction"] = fraction
                row |= _growth(row, rows)
                rows.append(row)
                print(_line(row), flush=True)
    return rows


def write_features(path: Path, scale: Scale, device: torch.device, *, seed: int = 0) -> float:
    """Features of train, val and test with a head, in an npz; the head's accuracy on test."""
    generator = torch.Generator().manual_seed(seed)
    size, classes = scale.layout.num_features, scale.layout.num_outputs
    index = torch.arange(1, size + 1, dtype=torch.float32)
    spread = index.pow(-0.5)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    means = _separation(classes) * torch.randn(classes, size, generator=generator) * spread * index.pow(-_MEANS_FALL)
    scaled = 1.2 * size**0.5 / spread.norm()
    offset = 2 * (rotation.square() @ spread.square()).sqrt()

    splits = {}
    for name, count in zip(("train", "val", "test"), (scale.num_examples, *2 * [scale.num_held_out]), strict=True):
        labels = torch.randint(classes, (count,), generator=generator)
        features = torch.empty(count, size, dtype=torch.float16)
        for start in range(0, count, _BLOCK):
            rows = slice(start, start + _BLOCK)
            noise = torch.randn(len(labels[rows]), size, generator=generator) * spread
            features[rows] = torch.relu_(((means[labels[rows]] + noise) @ rotation.T + offset) * scaled).half()
        splits[name] = features, labels
    weight, bias = _trained(*splits["train"], classes, device, generator)
    arrays = {f"features_{name}": features.numpy() for name, (features, _) in splits.items()}
    arrays |= {f"labels_{name}": labels.numpy() for name, (_, labels) in splits.items()}
    np.savez(path, **arrays, head_weight=weight.numpy(), head_bias=bias.numpy())
    features, labels = splits["test"]
    return float(((features.float() @ weight.T + bias).argmax(dim=1) == labels).double().mean())


def _separation(classes: int) -> float:
    """c: .78 of a thousand classes; others are as likely to be taken for one another, by the number of pairs."""

    def quantile(count: int) -> float:
        return NormalDist().inv_cdf(1 - 0.5 / max(2, count))

    return 0.78 * quantile(classes) / quantile(1000)


def _trained(
    features: torch.Tensor, labels: torch.Tensor, classes: int, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A head (K, D) and (K,) by Adam, its rate falling to zero."""
    weight = torch.zeros(classes, features.shape[1], device=device, requires_grad=True)
    bias = torch.zeros(classes, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=1e-3)
    steps_an_epoch = -(-len(labels) // _BATCH)
    epochs = max(_EPOCHS, -(-_STEPS // steps_an_epoch))
    steps = epochs * steps_an_epoch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(_BATCH):
            logits = features[rows].to(device).float() @ weight.T + bias
            loss = torch.nn.functional.cross_entropy(logits, labels[rows].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return weight.detach().cpu(), bias.detach().cpu()


def _steps(
    scale: Scale, folder: Path, *, device: torch.device, rates: machine.Rates, skip: tuple[str, ...]
) -> Iterator[Row]:
    before = time.perf_counter()
    accuracy = write_features(folder / "features.npz", scale, device)
    print(f"features made in {time.perf_counter() - before:.0f} s; its head is right for {accuracy:.1%}", flush=True)
    run = str(folder / "head.pt")
    precision: float | None = None
    for step in _commands(run, str(folder / "features.npz")):
        if step.name in skip:
            continue
        words = step.words
        if step.name == "fit-laplace diag":
            if precision is None:
                continue
            words = (*words, "--prior-precision", repr(precision))
        row = _timed(step, words, device)
        document = row.pop("document")
        if step.name == "fit-laplace kron":
            precision = document["metrics"]["prior_precision"]
        yield (
            row
            | _floor(step, document, scale, rates)
            | {"sizes": [*scale[:2], scale.layout.num_features, scale.layout.num_outputs]}
        )


def _commands(run: str, features: str) -> list[Step]:
    on = ("--posterior", "laplace")
    closed = tuple(word for name in CLOSED for word in ("--integrator", name))
    return [
        Step("extract-features", ("extract-features", run, "--from-npz", features)),
        Step("fit-temperature", ("fit-temperature", run)),
        Step("fit-laplace kron", ("fit-laplace", run, "--structure", "kron"), structure="kron"),
        Step("fit-laplace diag", ("fit-laplace", run, "--structure", "diag", "--name", "diag"), structure="diag"),
        Step("refine affine", ("refine", run, "--flow", "affine")),
        Step("hmc", ("hmc", run), draws=CHAINS),
        Step("predict closed forms", ("predict", run, *on, *closed)),
        Step("predict mc", ("predict", run, *on, "--integrator", "mc", "--samples", str(SAMPLES)), draws=SAMPLES),
        Step("evaluate", ("evaluate", run)),
    ]


def _timed(step: Step, words: tuple[str, ...], device: torch.device) -> Row:
    """Runs the command; seconds, and the largest memory of its own that it had."""
    command = [sys.executable, "-m", "bnncli", *words, "--json", "--device", str(device)]
    if step.name == "extract-features":  # copies only
        command = command[:-2]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        peak = _watched(process)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - before
        out.seek(0), err.seek(0)
        if code := os.waitstatus_to_exitcode(status):
            said = err.read().strip().splitlines()
            sys.exit(f"scaling.py: {' '.join(command[2:])} ended with {code}: {said[-1] if said else 'nothing said'}")
        document = json.loads(out.read())
    return {"step": step.name, "seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": peak,
            "document": document}  # fmt: skip


def _watched(process: subprocess.Popen[str]) -> int | None:
    """The largest memory of its own that the process had, files that it maps left out; None where nothing tells."""
    status, peak = Path(f"/proc/{process.pid}/status"), None
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            if line.startswith("RssAnon:"):
                peak = max(peak or 0, 1024 * int(line.split()[1]))
        time.sleep(0.02)
    return peak


def _floor(step: Step, document: dict[str, Any], scale: Scale, rates: machine.Rates) -> Row:
    """The bytes of features that a step has read, and the seconds that the machine needs at best for what it must do."""
    layout = scale.layout
    row_bytes = 2 * layout.num_features
    held_out = 2 * scale.num_held_out
    if step.name == "extract-features":
        size = row_bytes * (scale.num_examples + held_out)
        return {"features_read": size, "passes": None, "floor": Work(bytes=2 * size).seconds(rates)}
    cost = document.get("metrics", {}).get("cost")
    if cost is None:
        work = machine.gradient_work(held_out, layout).times(0.5 * step.draws)  # logits alone
        return {"features_read": row_bytes * held_out, "passes": None, "floor": work.seconds(rates)}
    passes = cost["gradient_passes"]
    work = machine.gradient_work(scale.num_examples, layout, draws=passes)
    work = work._replace(bytes=row_bytes * scale.num_examples * passes / step.draws)
    if step.structure:
        work = work.plus(machine.curvature_work(step.structure, scale.num_examples, layout))
        work = work.plus(machine.covariance_work(step.structure, layout))
    return {"features_read": int(work.bytes), "passes": passes, "floor": work.seconds(rates)}


def _growth(row: Row, before: list[Row]) -> Row:
    """log2 of how much longer than at the fraction before, for each doubling of N K."""
    same = [other for other in before if other["step"] == row["step"]]
    if not same:
        return {"growth": None}
    sizes = [other["sizes"][0] * other["sizes"][-1] for other in (row, same[-1])]
    return {"growth": math.log(row["seconds"] / same[-1]["seconds"]) / math.log(sizes[0] / sizes[1])}


def _line(row: Row) -> str:
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    growth = "-" if row["growth"] is None else f"{row['growth']:.2f}"
    return (
        f"{row['step']:<22}{row['seconds']:>9.1f}{row['cpu_seconds']:>9.1f}{peak:>10}"
        f"{row['features_read'] / 2**30:>11.2f} GiB{row['floor']:>9.2f}{growth:>8}"
    )
