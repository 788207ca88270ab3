"""Posteriors over whole networks on real data, beside published numbers: every posterior through the command line.

    python benchmarks/whole_networks.py --data DATA --checkpoints CHECKPOINTS --out runs
    python benchmarks/whole_networks.py --data DATA --out runs --only mlp-50 --quick

DATA holds npz files of bytes (x, y): fmnist-train.npz, fmnist-test.npz, mnist-test.npz, ...; CHECKPOINTS trained networks. Each
part prints a table a posterior and integrator; tables and how long each command took are also in OUT/report.json. A script
that was stopped goes on from what is there. What each part needs and does is said in its file, network_parts/NAME.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import machine
import torch
from network_parts import _bench

SCHEMA = "bnncli.benchmark.whole_networks/1"
PARTS = tuple(sorted(
    file.stem.replace("_", "-") for file in (Path(__file__).parent / "network_parts").glob("[!_]*.py")
))  # fmt: skip


def main() -> None:
    """Run the parts, print their tables, write the report. Exit 1 when one failed."""
    arguments = _parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = _bench.Bench(arguments.data, arguments.checkpoints, arguments.out.resolve(), arguments.quick)
    described = machine.describe(torch.device("cpu"))
    print(
        f"{described['platform']}, {described['cpu_count']} cores, {described['threads']} threads, torch {torch.__version__}"
    )
    reports = {name: _run(name, bench) for name in arguments.only or PARTS}
    report = {"schema": SCHEMA, "machine": described, "is_quick": arguments.quick, "parts": reports}
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if any("failed" in part for part in reports.values()) else 0)


def _run(name: str, bench: _bench.Bench) -> dict[str, Any]:
    """One part's tables, printed; or why there are none."""
    print(f"\n== {name}", flush=True)
    start = time.perf_counter()
    try:
        tables = importlib.import_module(f"network_parts.{name.replace('-', '_')}").run(bench)
    except _bench.LeftOut as reason:
        print(f"left out: {reason}")
        return {"left_out": str(reason)}
    except _bench.Failed as failure:
        print(f"failed: {failure}")
        return {"failed": str(failure)}
    for table in tables:
        print("\n" + "\n".join(table.lines()), flush=True)
    seconds = time.perf_counter() - start
    print(f"{name}: {seconds:.0f} s", flush=True)
    return {"seconds": seconds, "tables": [table.to_json() for table in tables]}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of npz files")
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of trained networks; what needs them is left out without it"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("whole-networks"), help="folder for runs and the report [whole-networks]"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few rows and draws, to try the script")
    arguments = parser.parse_args()
    for flag in ("data", "checkpoints"):
        folder = getattr(arguments, flag)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{flag}: expected a folder; {folder} is none")
    return arguments


if __name__ == "__main__":
    main()
