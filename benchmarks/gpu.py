"""What a GPU must show: right numbers, graphs and memory that hold, speed. Exit 1 when something is missed.

Three parts of at most eight minutes each. *correctness*: versions and flags; every command on the CPU and on the GPU; tests of
the project with their commands there. *memory*: captured steps against steps one by one, interrupted fits against whole
ones, every command twice and with little memory free, peaks against their estimates. *speed*: times against what an H200 is
held to, beside the floors that bytes and flops set. Without a GPU, --pretend runs the first two on a device that exists in
the tests alone: it shows that the script runs, and what such a device can show.

    python benchmarks/gpu.py --part all --json gpu.json
    python benchmarks/gpu.py --part correctness --pretend --quick
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is imported
# What --deterministic sets: one process runs all commands here, and cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parent))

import machine
from gpu_parts.gpu import Gpu, open_gpu
from gpu_parts.ledger import Ledger

from bnncli.errors import BnnError
from bnncli.machine.devices import resolve_device

SCHEMA = "bnncli.benchmark.gpu/1"
PARTS = ("correctness", "memory", "speed")
SECONDS = 480.0  # a part


def main() -> None:
    """Measure, print, write."""
    arguments = _parse()
    try:
        device = None if arguments.pretend else resolve_device(arguments.device)
    except BnnError as error:
        sys.exit(f"gpu.py: {error}; {error.hint}; or look at a pretend one with --pretend")
    with open_gpu(device) as gpu, tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        reports = {name: _run_part(name, gpu, Path(folder) / name, arguments) for name in _parts(arguments)}
        described = {"device": "pretend"} if gpu.is_pretend else machine.describe(gpu.device)
    missed = [f"{name}: {what}" for name, report in reports.items() for what in report["missed"]]
    if arguments.json:
        report = {"schema": SCHEMA, "machine": described, "is_quick": arguments.quick, "parts": reports}
        arguments.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"\n{len(missed)} missed" + "".join(f"\n  {text}" for text in missed))
    sys.exit(1 if missed else 0)


def _run_part(name: str, gpu: Gpu, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One part's report."""
    print(f"\n== {name}", flush=True)
    folder.mkdir()
    ledger = Ledger(arguments.seconds, arguments.only)
    start = time.monotonic()
    if name == "speed" and gpu.is_pretend:
        ledger.note("all of it is left out", "a pretend GPU has no speed")
    else:
        ledger.attempt(f"part {name}", _part, name, gpu, ledger, folder, arguments.quick)
    seconds = time.monotonic() - start
    print(f"{name}: {len(ledger.missed)} missed, {seconds:.0f} s", flush=True)
    return {"seconds": seconds, "missed": ledger.missed, "rows": ledger.rows}


def _part(name: str, gpu: Gpu, ledger: Ledger, folder: Path, is_quick: bool) -> None:
    """Imported here: a part whose needs are not installed is missed, and the others are run."""
    importlib.import_module(f"gpu_parts.{name}").run(gpu, ledger, folder, is_quick=is_quick)


def _parts(arguments: argparse.Namespace) -> tuple[str, ...]:
    return PARTS if arguments.part == "all" else (arguments.part,)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--device", default="cuda:0", help="cuda or cuda:N")
    parser.add_argument("--pretend", action="store_true", help="look at a pretend GPU in CPU memory instead")
    parser.add_argument("--quick", action="store_true", help="a little of each part, to try the script")
    parser.add_argument("--only", default="", metavar="REGEX", help="only items in whose names this is found")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a part; what is not begun then is missed")
    parser.add_argument("--dir", type=Path, help="folder for temporary runs")
    parser.add_argument("--json", type=Path, help="write the report to this file as JSON")
    arguments = parser.parse_args()
    if not arguments.pretend and not arguments.device.startswith("cuda"):
        parser.error(f"--device: expected cuda or cuda:N; got {arguments.device!r}")
    if not 0 < arguments.seconds < math.inf:
        parser.error("--seconds: expected a positive number")
    return arguments


if __name__ == "__main__":
    main()
