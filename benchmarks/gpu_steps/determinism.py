"""Step *determinism*: every command twice, once with little memory free, and twice with --deterministic.

README.md promises the same content for the same inputs, options, seed, device and thread count, whatever memory is free: equal
digests are demanded by default, and with --deterministic. A command that refuses --deterministic has to name the kernel.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from gpu_steps.artifacts import document_differences
from gpu_steps.bench import Bench
from gpu_steps.cases import Case, cases, small_case
from gpu_steps.device import Gpu
from gpu_steps.ledger import Ledger
from gpu_steps.lines import Done, command_of, run_line, takes_device

ROOM = 3 << 30  # bytes that are left free beside the ballast under which content must be the same
KINDS = ("once", "twice", "with ballast", "deterministic", "deterministic again")
WITHOUT_BALLAST = ("auto",)  # of its parts each is tried by itself
PAGES_ALONE = ("report",)  # slow, and what they make names its folder: run once, and once with --deterministic
SLOW = ("evaluate", "diagnose")  # left out of the second case
QUICK = ("extract-features", "fit-laplace", "predict")

# Shorter fits, of the commands whose lines leave these open: the same kernels, fewer times.
SHORTER = {"refine": "--epochs 100 --elbo-draws 32", "hmc": "--warmup 20 --draws 40"}
# "RuntimeError: histc_cuda does not have a deterministic implementation, but you set ..."
REFUSAL = re.compile(r"(\S+) does not have a deterministic")


def run(bench: Bench) -> None:
    """Run lines in folders that grow side by side, one a kind of repetition."""
    gpu, ledger, folder, is_quick = bench.gpu, bench.ledger, bench.folder, bench.is_quick
    seen: set[str] = set()
    for case in [small_case()] if is_quick or gpu.is_pretend else _chosen_cases():
        folders = {kind: folder / case.name / kind for kind in KINDS}
        for place in folders.values():
            case.prepare(place)
        lines = [line for line in case.lines if takes_device(line)]
        if is_quick:
            lines = [line for line in lines if command_of(line) in QUICK]
        for line in lines:
            has_ballast = command_of(line) not in (*seen, *WITHOUT_BALLAST)
            seen.add(command_of(line))
            ledger.item(
                f"{case.name}: {_short(line)}", _check_line, gpu, ledger, case, _shortened(line), folders, has_ballast
            )
        shutil.rmtree(folder / case.name)


def _chosen_cases() -> list[Case]:
    """The embedded network, each command once, and a head with more features than examples."""
    by_name = {case.name: case for case in cases()}
    images = by_name["images"]
    thinned = images.thinned().lines
    needed = "extract-features FOLDER/net-0"  # what fit-ensemble and auto read
    lines = [line for line in images.lines if line in thinned or line.startswith(needed)]
    wide = by_name["wide"]
    return [
        replace(images, lines=tuple(lines)),
        replace(wide, lines=tuple(line for line in wide.lines if command_of(line) not in SLOW)),
    ]


def _shortened(line: str) -> str:
    """The line with fewer epochs or draws, where it does not say how many."""
    more = SHORTER.get(command_of(line), "")
    return line if not more or any(word in line.split() for word in more.split()[::2]) else f"{line} {more}"


def _check_line(gpu: Gpu, ledger: Ledger, case: Case, line: str, folders: dict[str, Path], has_ballast: bool) -> None:
    name = f"{case.name}: {_short(line)}"
    once = run_line(line, folders["once"], gpu.name)
    if not ledger.agree(name, once.code == 0, once.failure):
        return
    if command_of(line) in PAGES_ALONE:
        done = _run_deterministic(gpu, line, folders["deterministic"])
        ledger.agree(f"{name}: --deterministic", done.code == 0, done.failure)
        return
    twice = run_line(line, folders["twice"], gpu.name)
    ledger.agree(f"{name}: twice, the same content", *_is_same(once, twice))
    if has_ballast:
        with gpu.ballast(ROOM):
            ballast = run_line(line, folders["with ballast"], gpu.name)
        ledger.agree(f"{name}: with {ROOM >> 30} GiB free, the same content", *_is_same(once, ballast))
    else:  # what comes later may read what this makes
        copied = _copy_outputs(once, folders["with ballast"])
        ledger.note(f"{name}: not tried with little memory free", f"{copied} files taken over")
    _check_deterministic(gpu, ledger, name, once, folders)


def _check_deterministic(gpu: Gpu, ledger: Ledger, name: str, once: Done, folders: dict[str, Path]) -> None:
    """With --deterministic a command does the same twice, or names the kernel that cannot."""
    kinds = ("deterministic", "deterministic again")
    first, second = (_run_deterministic(gpu, once.line, folders[kind]) for kind in kinds)
    if first.code != 0 and (refused := REFUSAL.search(first.stderr + str(first.document.get("error")))):
        ledger.agree(f"{name}: --deterministic, done or names the kernel that refuses", True)
        ledger.note(f"{name}: --deterministic is refused", f"exit {first.code}, kernel {refused[1]}")
        for kind in kinds:  # later lines read what this one makes
            run_line(once.line, folders[kind], gpu.name)
        return
    ledger.agree(f"{name}: --deterministic, done or names the kernel that refuses", first.code == 0, first.failure)
    if first.code == 0:
        ledger.agree(f"{name}: --deterministic twice, the same content", *_is_same(first, second))
        is_same, differs = _is_same(once, first)
        if not is_same:
            ledger.note(f"{name}: --deterministic has other content than the default", differs)


def _run_deterministic(gpu: Gpu, line: str, folder: Path) -> Done:
    """Run the line with --deterministic, which sets torch for the whole process, and set it back."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        return run_line(line, folder, gpu.name, "--deterministic")
    finally:
        torch.use_deterministic_algorithms(before)


def _copy_outputs(done: Done, folder: Path) -> int:
    """Put what a command made where another folder would have it; return how many files that are."""
    for path in done.digests:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(done.folder / path, folder / path)
    return len(done.digests)


def _is_same(once: Done, again: Done) -> tuple[bool, str]:
    """Whether all outputs have the same digests, and what is printed alone the same numbers; what differs, otherwise.

    Pages name the folders that they are of, which differ.
    """
    if again.code != once.code:
        return False, again.failure
    paths = sorted(path for path in {*once.digests, *again.digests} if not path.endswith(".html"))
    others = [path for path in paths if once.digests.get(path) != again.digests.get(path)]
    printed = document_differences(command_of(once.line), once.document, again.document)
    others += [f"{difference.what}, by {difference.value:.2g}" for difference in printed if difference.value != 0]
    return not others, f"other content: {', '.join(others)[:300]}"


def _short(line: str) -> str:
    return " ".join(word for word in line.split() if not word.startswith("FOLDER") and "npz:" not in word)
