"""Step *commands*: flags, float32, and every command on the CPU and on the GPU, by registry, on small runs.

Each line runs on the CPU, in a run made on the CPU, and on the GPU in a copy of the same: what differs is that command's own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from gpu_steps import artifacts
from gpu_steps.bench import Bench
from gpu_steps.cases import Case, cases, small_case, without_line
from gpu_steps.device import Gpu
from gpu_steps.ledger import Ledger
from gpu_steps.lines import Done, command_of, copied, run_line, takes_device

from bnncli.system.devices import configure_torch

PRODUCT = 1e-5  # error of a float32 product or convolution, of its largest number; TF32 has a thousandth


def run(bench: Bench) -> None:
    """Run all lines; folders of runs are made in the bench's."""
    gpu, ledger = bench.gpu, bench.ledger
    ledger.item("flags", _flags, gpu, ledger)
    ledger.item("float32", _float32, gpu, ledger)
    missing = without_line(cases())
    ledger.agree("every command has a line", not missing, f"none runs {', '.join(missing)}")
    for case in [small_case()] if bench.is_quick else cases(is_slow=gpu.is_pretend):
        reference = bench.folder / case.name
        case.prepare(reference)
        for line in case.lines:
            ledger.item(f"{case.name}: {_short(line)}", _compare, gpu, ledger, case, line, reference)
        shutil.rmtree(reference)


def _flags(gpu: Gpu, ledger: Ledger) -> None:
    configure_torch(threads=None, deterministic=False)
    for name, value in flags(gpu).items():
        ledger.note(name, str(value))
    is_off = not (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
    ledger.agree("TF32 is off", is_off)


def flags(gpu: Gpu) -> dict[str, Any]:
    """What the numbers depend on: the device, its driver, versions, and what torch is set to."""
    return {
        **gpu.facts(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "TF32 in products": torch.backends.cuda.matmul.allow_tf32,
        "TF32 in convolutions": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _float32(gpu: Gpu, ledger: Ledger) -> None:
    """Products and convolutions of float32 have seven digits there."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, 300, generator=generator) for _ in range(2))
    product = (a.to(gpu.device) @ b.to(gpu.device)).cpu()
    images, kernel = torch.randn(4, 8, 20, 20, generator=generator), torch.randn(8, 8, 5, 5, generator=generator)
    convolve = torch.nn.functional.conv2d
    convolved = convolve(images.to(gpu.device), kernel.to(gpu.device)).cpu()
    for name, got, exact in (
        ("a float32 product", product, a.double() @ b.double()),
        ("a float32 convolution", convolved, convolve(images.double(), kernel.double())),
    ):
        ledger.check(f"error of {name}", float((got - exact).abs().max() / exact.abs().max()), PRODUCT)


def _compare(gpu: Gpu, ledger: Ledger, case: Case, line: str, reference: Path) -> None:
    """One line on the GPU in a copy of the reference, then on the CPU in the reference itself, which so grows."""
    name = f"{case.name}: {_short(line)}"
    with copied(reference) as copy:
        gpu.problems()
        made = run_line(line, copy, gpu.name)
        problems = gpu.problems()
        expected = run_line(line, reference, "cpu")
        if not ledger.agree(f"{name}: CPU", expected.code == 0, expected.failure):
            return
        if not ledger.agree(f"{name}: GPU" if takes_device(line) else name, made.code == 0, made.failure):
            return
        ledger.agree(f"{name}: one device, captures without waits", not problems, "; ".join(problems))
        if takes_device(line):
            _judge(ledger, name, expected, made)


def _judge(ledger: Ledger, name: str, expected: Done, made: Done) -> None:
    """The largest difference of each kind, over all that a line made; what was made on the GPU is whole."""
    command = command_of(expected.line)
    found = list(artifacts.document_differences(command, expected.document, made.document))
    is_same = set(expected.digests) == set(made.digests)
    ledger.agree(f"{name}: the same files", is_same, f"{len(expected.digests)} and {len(made.digests)}")
    if command != "demo":  # there each device went its own way: its scores are compared
        for path in sorted(set(expected.digests) & set(made.digests)):
            found += artifacts.differences(expected.folder / path, made.folder / path)
    for what in dict.fromkeys(difference.what for difference in found):
        same = [difference for difference in found if difference.what == what]
        worst = max(same, key=lambda difference: _share(difference.value, difference.most))
        ledger.check(f"{name}: {what}", worst.value, worst.most)
    files = [str(made.folder / path) for path in made.digests if not path.endswith((*artifacts.PAGES, ".csv"))]
    if files:
        checked = run_line("verify " + " ".join(files), made.folder, "cpu")
        ledger.agree(f"{name}: verify accepts it", checked.code == 0, checked.failure)


def _share(value: float, most: float) -> float:
    """Of what it may be; a value that is no number comes first."""
    return value / most if value == value else float("inf")


def _short(line: str) -> str:
    """The line without what all lines have."""
    return " ".join(word for word in line.split() if not word.startswith("FOLDER") and "npz:" not in word)
