"""Step *determinism*: every command twice, with little memory free, and with --deterministic: where is the content the same?"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from gpu_steps.bench import Bench
from gpu_steps.cases import Case, cases, small_case
from gpu_steps.device import Gpu
from gpu_steps.ledger import Ledger
from gpu_steps.lines import Done, command_of, run_line, takes_device

ROOM = 3 << 30  # bytes that are left free beside the ballast under which content must be the same
REPEATED = ("images", "single-logit", "wide")
QUICK = ("extract-features", "fit-laplace", "predict")


def run(bench: Bench) -> None:
    """Run lines in four folders that grow side by side: two alike, one with ballast held, one with --deterministic."""
    gpu, ledger, folder, is_quick = bench.gpu, bench.ledger, bench.folder, bench.is_quick
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


def _short(line: str) -> str:
    return " ".join(word for word in line.split() if not word.startswith("FOLDER") and "npz:" not in word)
