"""Every command twice, with little memory free, and with deterministic kernels: the same content; and out of memory, an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from bnncli.errors import Exit
from gpu_parts.cases import Case, cases, small_case
from gpu_parts.commands import Done, command_of, copied, run_line, takes_device
from gpu_parts.gpu import Gpu
from gpu_parts.ledger import Ledger

ROOM = 3 << 30  # bytes that are left free beside the ballast under which content must be the same
REPEATED = ("images", "single-logit", "wide")
QUICK = ("extract-features", "fit-laplace", "predict")
WITHOUT_RUN = ("extract-features", "integrals", "demo")
SCARCE = (1 << 20, 1 << 26)  # bytes with which a command must fail clearly, or do with smaller blocks


def check_repeats(gpu: Gpu, ledger: Ledger, folder: Path, *, is_quick: bool) -> None:
    """Lines in four runs that grow side by side: two alike, one with ballast held, one with --deterministic."""
    chosen = [small_case()] if is_quick or gpu.is_pretend else [case for case in cases() if case.name in REPEATED]
    for case in chosen:
        runs = {kind: folder / case.name / kind for kind in ("once", "twice", "with ballast", "deterministic")}
        for run in runs.values():
            case.prepare(run)
        lines = [line for line in case.lines if takes_device(line)]
        if is_quick:
            lines = [line for line in lines if command_of(line) in QUICK]
        for line in lines:
            ledger.item(f"{case.name}: {_short(line)}", _check_line, gpu, ledger, case, line, runs)
        for line in _one_of_each(lines) if case.name in ("small", "images") else ():
            ledger.item(f"out of memory, {command_of(line)}", _check_scarce, gpu, ledger, line, runs["once"], is_quick)
        shutil.rmtree(folder / case.name)


def _check_line(gpu: Gpu, ledger: Ledger, case: Case, line: str, runs: dict[str, Path]) -> None:
    name = f"{case.name}: {_short(line)}"
    once = run_line(line, runs["once"], gpu.name)
    if not ledger.agree(name, once.code == 0, once.failure):
        return
    twice = run_line(line, runs["twice"], gpu.name)
    with gpu.ballast(ROOM):
        ballast = run_line(line, runs["with ballast"], gpu.name)
    for kind, again in (("twice", twice), ("with ballast", ballast)):
        ledger.agree(f"{name}: {kind}, the same content", *_is_same(once, again))
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        other = run_line(line, runs["deterministic"], gpu.name, "--deterministic")
    finally:
        torch.use_deterministic_algorithms(deterministic)
    ledger.agree(f"{name}: --deterministic", other.code == 0, other.failure)


def _is_same(once: Done, again: Done) -> tuple[bool, str]:
    """Whether all outputs have the same digests; which have not, otherwise."""
    if again.code != once.code:
        return False, again.failure
    others = [path for path, digest in once.digests.items() if again.digests.get(path) != digest]
    return not others, f"other content: {', '.join(others)[:300]}"


def _one_of_each(lines: list[str]) -> list[str]:
    """The first line of each command that computes with what the run holds."""
    firsts = {command_of(line): line for line in reversed(lines)}
    return [line for line in lines if firsts[command_of(line)] == line and command_of(line) not in WITHOUT_RUN]


def _check_scarce(gpu: Gpu, ledger: Ledger, line: str, run: Path, is_quick: bool) -> None:
    """With next to no memory it ends well, or with the device's exit code and a clear error; then it works again."""
    name = command_of(line)
    words = [] if name == "diagnose" else ["--force"]
    for leave in SCARCE[:1] if is_quick else SCARCE:
        with copied(run) as copy:
            with gpu.ballast(leave):
                starved = run_line(line, copy, gpu.name, *words)
            ledger.agree(f"{name}, {leave >> 20} MiB free: done, or a clear error", *_is_clear(starved))
            after = run_line(line, copy, gpu.name, *words)
            ledger.agree(f"{name} after that, with all memory free", after.code == 0, after.failure)


def _is_clear(done: Done) -> tuple[bool, str]:
    """Whether a command went on with less memory, or said so that it cannot, as an error of the device."""
    error = done.document.get("error", {})
    is_error = done.code == Exit.DEVICE and bool(error.get("hint")) and "Traceback" not in done.stderr
    return done.code == Exit.OK or is_error, done.failure


def _short(line: str) -> str:
    return " ".join(word for word in line.split() if not word.startswith("FOLDER") and "npz:" not in word)
