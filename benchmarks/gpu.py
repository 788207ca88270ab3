"""What a GPU must show: right numbers, speed, and errors that leave nothing behind. Exit 1 if a check is missed.

Each step runs in a process of its own, ends by itself, and prints one line a check: held or missed. Rows go to a file of
JSON lines as they come, so that a kill loses nothing. Without a GPU, --pretend --quick runs all steps on a device that
exists in CPU memory: it shows that the script runs, and that no step mixes devices.

    python benchmarks/gpu.py --step smoke lenet-speed --data DATA --checkpoints CHECKPOINTS --json gpu.jsonl
    python benchmarks/gpu.py --pretend --quick

DATA holds fmnist-train.npz, fmnist-test.npz and kmnist-test.npz (x, y), and cifar10.npz (x_train, y_train, x_test, y_test); CHECKPOINTS lenet-fmnist-1.pt and
resnet20-12fca82f.th. Without them the steps use the embedded network and made-up data.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is imported
# What --deterministic sets: a step runs many commands in one process, and cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parent))

import machine
from gpu_steps import bench as benches
from gpu_steps.bench import Bench
from gpu_steps.device import open_gpu
from gpu_steps.ledger import Ledger

from bnncli.errors import BnnError
from bnncli.system.devices import configure_torch, resolve_device

SCHEMA = "bnncli.benchmark.gpu/2"
STEPS = (
    "smoke", "lenet-speed", "lbbnn", "wide", "imagenet", "network", "faults", "determinism", "torchrun",
    "commands", "graphs",
)  # fmt: skip
SECONDS = 240.0  # a step


def main() -> None:
    """Run the steps one after another."""
    arguments = _parse()
    missed: list[str] = []
    for name in arguments.step:
        print(f"\n== {name}", flush=True)
        missed += _in_own_process(name, arguments)
    print(f"\n{len(missed)} missed" + "".join(f"\n  {text}" for text in missed))
    sys.exit(1 if missed else 0)


def _in_own_process(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return what a step missed. A fork: a CUDA error, which poisons its process, and a hang end that step alone."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_step, args=(name, arguments, theirs))
    process.start()
    theirs.close()
    start = time.monotonic()
    try:
        found = ours.recv() if ours.poll(arguments.seconds + benches.GRACE) else ["the step did not end in time"]
    except EOFError:
        found = ["the step's process died"]
    process.kill()
    process.join()
    found = [f"{name}: {what}" for what in found]
    seconds = time.monotonic() - start
    print(f"{name}: {len(found)} missed, {seconds:.0f} s", flush=True)
    return found


def _run_step(name: str, arguments: argparse.Namespace, pipe: multiprocessing.connection.Connection) -> None:
    """Send what is missed through the pipe."""
    try:
        device = None if arguments.pretend else resolve_device(arguments.device)
    except BnnError as error:
        sys.exit(f"gpu.py: {error}; {error.hint}; or use --pretend")
    configure_torch(threads=None, deterministic=False)
    with open_gpu(device) as gpu, tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        ledger = Ledger(arguments.seconds, arguments.only, step=name, path=arguments.json)
        described = {"device": "pretend"} if gpu.is_pretend else machine.describe(gpu.device)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        ledger.record({
            "schema": SCHEMA, "machine": described, "date": today, "commit": arguments.commit or _commit(),
            "is_quick": arguments.quick,
        })  # fmt: skip
        bench = Bench(gpu, ledger, Path(folder), arguments.quick, arguments.data, arguments.checkpoints)
        start = time.monotonic()
        # Imported here: a step whose needs are not installed is missed, and the others run.
        ledger.attempt(name, lambda: importlib.import_module(f"gpu_steps.{name.replace('-', '_')}").run(bench))
        ledger.record({"seconds": time.monotonic() - start, "num_missed": len(ledger.missed)})
        pipe.send(ledger.missed)


def _commit() -> str | None:
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--step", nargs="+", choices=STEPS, default=STEPS, metavar="NAME", help=f"{', '.join(STEPS)} [all]"
    )
    parser.add_argument("--device", default="cuda:0", help="cuda or cuda:N [cuda:0]")
    parser.add_argument("--pretend", action="store_true", help="use a pretend GPU in CPU memory")
    parser.add_argument("--quick", action="store_true", help="a little of each step, to try the script")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the items whose names match")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of a step; items not begun by then are missed [240]"
    )
    parser.add_argument("--data", type=Path, help="folder of npz files")
    parser.add_argument("--checkpoints", type=Path, help="folder of trained networks")
    parser.add_argument("--dir", type=Path, help="folder for temporary runs")
    parser.add_argument("--json", type=Path, help="append rows to this file, one JSON document a line")
    parser.add_argument("--commit", help="of the code, where there is no git")
    arguments = parser.parse_args()
    if not arguments.pretend and not arguments.device.startswith("cuda"):
        parser.error(f"--device: expected cuda or cuda:N; got {arguments.device!r}")
    if not 0 < arguments.seconds < math.inf:
        parser.error("--seconds: expected a positive number")
    for flag in ("data", "checkpoints"):
        folder = getattr(arguments, flag)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{flag}: expected a folder; {folder} is none")
    return arguments


if __name__ == "__main__":
    main()
