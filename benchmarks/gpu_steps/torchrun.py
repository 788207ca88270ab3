"""Step *torchrun*: workers that torchrun starts give the results of one process without it.

The reference is a process with --shards 64, as torchrun has it: sums are added in the same order, and chains, which part at
the first other digit, stay together. One worker has nobody to talk to: NCCL is used where there are two GPUs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from gpu_steps.bench import Bench
from gpu_steps.cases import cases
from gpu_steps.ledger import Ledger
from gpu_steps.lines import Done, run_line, start_line
from torch import Tensor

from bnncli.artifacts.posteriors import read_posterior
from bnncli.artifacts.samples import read_samples
from bnncli.errors import Exit

SAME = 1e-6  # of the largest number of a tensor
SHARDS = ("--shards", "64")
ONE_THREAD = ("--threads", "1")
SECONDS = 70.0  # a torchrun

_PRIOR = "--prior-precision 100"
LINES = {
    "full": f"fit-laplace FOLDER/run {_PRIOR} --structure full --name full",
    "kron": f"fit-laplace FOLDER/run {_PRIOR} --structure kron --name kron",
    "refine": "refine FOLDER/run --epochs 100 --elbo-draws 32",
    "hmc": "hmc FOLDER/run --chains 8 --warmup 20 --draws 40",
    "temperature": "fit-temperature FOLDER/run",
    "vi": "fit-vi FOLDER/run --epochs 20",
}


def run(bench: Bench) -> None:
    """Fits on the embedded network's head by one worker, and by two where there are two GPUs."""
    gpu, ledger = bench.gpu, bench.ledger
    if gpu.is_pretend:
        ledger.note("torchrun", "left out: its workers know no pretend GPU")
        return
    case = next(case for case in cases() if case.name == "images")
    embedded = bench.folder / case.name
    case.prepare(embedded)
    prepared = [run_line(line, embedded, gpu.name) for line in case.lines[:2]]
    if ledger.agree("features and Gaussian of the embedded network", not any(done.code for done in prepared)):
        ledger.attempt(
            "torchrun", lambda: check_workers(ledger, embedded, gpu.name, num_gpus=torch.cuda.device_count())
        )


def check_workers(
    ledger: Ledger, run: Path, device: str, *, num_gpus: int, sizes: tuple[int, ...] = (1,), num_at_once: int = 12
) -> None:
    """Run each line without torchrun and under it, by so many workers, all side by side.

    Args:
        device: cuda:N, of the reference and of a single worker; cpu to try the script, with gloo.
        sizes: numbers of workers beside two, which are tried where there are two GPUs.
    """
    if num_gpus >= 2:
        sizes = (*sizes, 2)
    else:
        ledger.note("two workers by NCCL", f"{num_gpus} GPU visible: two processes not run")
    own = device if device == "cpu" else "cuda"  # with which each worker takes its own GPU
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_at_once) as pool:
        found = {
            (name, size): pool.submit(_by_torchrun, line, run, f"{name}-{size}", own, size).result
            for size in sizes
            for name, line in LINES.items()
        }
        crowded = pool.submit(_by_torchrun, LINES["full"], run, "crowded", own, num_gpus + 1).result
        try:
            alone = {
                name: run_line(line, _apart(run, f"{name}-alone"), device, *SHARDS, *ONE_THREAD)
                for name, line in LINES.items()
            }
        finally:
            torch.set_num_threads(threads)
        for (name, size), result in found.items():
            ledger.item(f"torchrun: {name}, {size}", _judge, ledger, name, size, alone[name], result)
        if num_gpus:
            ledger.item("torchrun: more workers than GPUs", _judge_crowded, ledger, num_gpus, crowded)


def _apart(run: Path, name: str) -> Path:
    """A copy of the run for one command."""
    copy = run.with_name(f"{run.name}-{name}")
    shutil.copytree(run, copy)
    return copy


def _by_torchrun(line: str, run: Path, name: str, device: str, size: int) -> Done:
    """Run the line in a copy of the run, by so many workers that torchrun starts on this machine."""
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
        "-m",
        "bnncli",
    )
    return start_line(line, _apart(run, name), device, *ONE_THREAD, launcher=launcher).wait(SECONDS)


def _judge(ledger: Ledger, name: str, size: int, alone: Done, result: Callable[[], Done]) -> None:
    """Compare what the workers made with what one process made."""
    what = f"{name} by torchrun, {size} {'worker' if size == 1 else 'workers'}"
    done = result()
    if not ledger.agree(f"{name} without torchrun: exit 0", alone.code == 0, alone.failure):
        return
    if not ledger.agree(f"{what}: exit 0", done.code == 0, done.failure):
        return
    is_same = set(done.digests) == set(alone.digests) and bool(alone.digests)
    ledger.agree(f"{what}: the same files", is_same, f"{sorted(done.digests)}, {sorted(alone.digests)}")
    for path in sorted(set(done.digests) & set(alone.digests)):
        apart = max(_differences(alone.folder / path, done.folder / path).values())
        ledger.check(f"{what}: difference from one process, of the largest number", apart, SAME)
    ledger.note(f"{what}: digests", "equal" if done.digests == alone.digests else "other than of one process",
                seconds=done.seconds)  # fmt: skip


def _differences(reference: Path, made: Path) -> dict[str, float]:
    """The largest difference of each tensor, of its largest number, by the tensor's name; of draws, of their means."""
    one, other = (_tensors(path) for path in (reference, made))
    return {
        name: _apart_by(one[name], other[name]) if name in one and name in other else np.inf for name in one | other
    }


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """What a posterior says: means and covariances, or the mean of its draws."""
    if path.suffix == ".nc":
        draws = read_samples(path).draws
        return {name: np.asarray(values, np.float64).mean(axis=(0, 1)) for name, values in draws.items()}
    tensors: dict[str, Tensor] = read_posterior(path)[0]
    return {name: tensor.double().cpu().numpy() for name, tensor in tensors.items() if tensor.numel()}


def _apart_by(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float(np.abs(one - other).max() / max(1e-30, float(np.abs(one).max())))


def _judge_crowded(ledger: Ledger, num_gpus: int, result: Callable[[], Done]) -> None:
    """More workers than GPUs are refused in words; torchrun's own exit code is 1 for every failure."""
    done = result()
    error = done.document.get("error") or {}
    is_refused = done.code != 0 and done.document.get("exit") == Exit.USAGE and "GPUs" in str(error.get("message"))
    what = (
        f"torchrun, {num_gpus + 1} workers and {num_gpus} GPU: refused with exit {Exit.USAGE:d} and how many to start"
    )
    ledger.agree(what, is_refused and "--nproc-per-node" in str(error.get("hint")), f"{error}, {done.failure}")
