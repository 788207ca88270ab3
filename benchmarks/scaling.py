"""How cost grows: N, D and K doubled one at a time on synthetic features, from memory or from disk.

Beside each measured growth exponent (log2 of the seconds' ratio) stands the expected one, from the work that the job
must do at both sizes. Small points are ruled by overheads, so that exponents are below the expected ones there.

    python benchmarks/scaling.py --base 2000,64,10 --from disk --out scaling.json
    python benchmarks/scaling.py --point 1280000,2048,1000 --jobs gradient,kron,mode
    python benchmarks/scaling.py --imagenet 0.025,0.05,0.1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bnncli.system.memory import SHARE, budget

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is imported

import imagenet
import machine
import torch
from machine import Work
from scaling_jobs import JOBS, NUM_CHAINS, PRIOR_PRECISION, Point, Sizes
from synthetic import open_target, write_split

from bnncli.errors import BnnError
from bnncli.inference import memory
from bnncli.system.devices import available_memory, configure_torch, resolve_device

SCHEMA = "bnncli.benchmark.scaling/1"
Row = dict[str, Any]


def main() -> None:
    """Measure, print, write."""
    arguments = _parse()
    configure_torch(threads=None, deterministic=False)
    try:
        device = resolve_device(arguments.device)
        rates = machine.measure_rates(device, size=256 if arguments.quick else None)
        if arguments.imagenet:
            rows = imagenet.measure(
                arguments.imagenet, rates, device=device, folder=arguments.dir, skip=arguments.skip,
                num_features=arguments.features, num_held_out=arguments.held_out,
            )  # fmt: skip
        else:
            rows = list(_measure(arguments, device, rates))
        summary = [] if arguments.imagenet else _summary(rows)
    except BnnError as error:
        sys.exit(f"scaling.py: {error}")
    report = {"schema": SCHEMA, "machine": machine.describe(device), "rates": rates._asdict(), "from": arguments.source,
              "summary": summary, "rows": rows}  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _measure(arguments: argparse.Namespace, device: torch.device, rates: machine.Rates) -> Iterator[Row]:
    """One row for each job at each point, printed as it comes."""
    print(f"{'axis':<6}{'N':>9}{'D':>6}{'K':>6}  {'job':<9}{'seconds':>10}{'x floor':>9}{'growth':>8}{'expected':>9}")
    names = arguments.jobs.split(",")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        for axis, points in _axes(arguments):
            before: dict[str, Row] = {}
            for sizes in points:
                wanted = [name for name in names if _is_worthwhile(name, sizes, before, arguments, device)]
                if not wanted or not _has_room(sizes, arguments, device):
                    break
                for row in _point(sizes, wanted, Path(folder), arguments=arguments, device=device):
                    name = row["job"]
                    row |= {"axis": axis, **_growth(row, before.get(name))}
                    row["times_floor"] = row["seconds"] / Work(*row["work"]).seconds(rates)
                    before[name] = row
                    print(_line(row), flush=True)
                    yield row


def _axes(arguments: argparse.Namespace) -> Iterator[tuple[str, Iterator[Sizes]]]:
    """Each axis with its growing points."""
    if arguments.point:
        yield "point", iter([arguments.point])
        return

    def doubled(axis: str) -> Iterator[Sizes]:
        sizes = arguments.base
        for _ in range(arguments.doublings + 1):
            yield sizes
            sizes = sizes._replace(**{axis: 2 * getattr(sizes, axis)})

    for axis in Sizes._fields:
        yield axis, doubled(axis)


def _point(
    sizes: Sizes, names: list[str], folder: Path, *, arguments: argparse.Namespace, device: torch.device
) -> Iterator[Row]:
    """Every job at one point; its file is removed before the next."""
    path = folder / "train.h5"
    write_split(path, sizes.N, sizes.layout, seed=arguments.seed)
    target = open_target(path, sizes.layout, PRIOR_PRECISION, device=device, is_mapped=arguments.source == "disk")
    point = Point(target)
    for name in names:
        job = JOBS[name]
        if name in ("hmc", "refine"):
            point.base  # noqa: B018
        repeats = 1 if arguments.quick else 5
        if sizes == arguments.base:
            job.run(point)  # first calls load libraries
        seconds, count = machine.best_of(partial(job.run, point), device, repeats=repeats, short=2.0)
        yield {
            **sizes._asdict(),
            "job": name,
            "seconds": seconds / count,
            "count": count,
            "work": list(job.work(sizes)),
        }
    path.unlink()


def _growth(row: Row, before: Row | None) -> Row:
    """Measured and expected exponents since the point before."""
    if before is None:
        return {"growth": None, "expected_growth": None}
    now, then = (sum(Work(*r["work"])[:2]) for r in (row, before))
    return {"growth": math.log2(row["seconds"] / before["seconds"]), "expected_growth": math.log2(now / then)}


def _summary(rows: list[Row]) -> list[Row]:
    """Exponents over the larger half of each axis's points, where overheads are small and noise averages out."""
    found = []
    for axis, name in dict.fromkeys((row["axis"], row["job"]) for row in rows):
        series = [row for row in rows if (row["axis"], row["job"]) == (axis, name)]
        first, last = series[(len(series) - 1) // 2], series[-1]
        doublings = math.log2(last.get(axis, 1) / first.get(axis, 1))
        if doublings == 0:
            continue
        whole = _growth(last, first)
        found.append(
            {
                "axis": axis,
                "job": name,
                "doublings": doublings,
                **{key: value / doublings for key, value in whole.items()},
            }
        )
    if found:
        print(
            f"\nover the larger half of the points\n{'axis':<6}{'job':<10}{'doublings':>9}{'growth':>8}{'expected':>9}"
        )
    for row in found:
        print(
            f"{row['axis']:<6}{row['job']:<10}{row['doublings']:>9.0f}{row['growth']:>8.2f}{row['expected_growth']:>9.2f}"
        )
    return found


def _has_room(sizes: Sizes, arguments: argparse.Namespace, device: torch.device) -> bool:
    """Whether the features fit where they are to lie; they are made in memory, and written to a file."""
    there = SHARE * available_memory(torch.device("cpu"))
    if arguments.source == "memory":
        return 2 * sizes.bytes <= there and sizes.bytes <= budget(device)
    return sizes.bytes <= there


def _is_worthwhile(
    name: str, sizes: Sizes, before: dict[str, Row], arguments: argparse.Namespace, device: torch.device
) -> bool:
    """Whether the job fits in memory, and is not expected to outlast the limit at these sizes."""
    job = JOBS[name]
    if memory.fit_bytes(job.structure, sizes.layout, num_draws=NUM_CHAINS) > budget(device):
        return False
    if name not in before:
        return bool(sizes == arguments.base or sizes == arguments.point)
    row = before[name]
    ratio = sum(job.work(sizes)[:2]) / sum(Work(*row["work"])[:2])
    return bool(ratio * row["seconds"] * row["count"] <= arguments.max_seconds)


def _line(row: Row) -> str:
    growth = "".join(
        "-".rjust(w) if row[key] is None else f"{row[key]:>{w}.2f}"
        for key, w in (("growth", 8), ("expected_growth", 9))
    )
    return (
        f"{row['axis']:<6}{row['N']:>9}{row['D']:>6}{row['K']:>6}  {row['job']:<9}{row['seconds']:>10.4g}"
        f"{row['times_floor']:>9.1f}{growth}"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=_sizes, default=Sizes(2000, 64, 10), metavar="N,D,K", help="the first point")
    parser.add_argument("--point", type=_sizes, metavar="N,D,K", help="measure this point alone")
    parser.add_argument(
        "--imagenet",
        type=_numbers,
        metavar="FRACTIONS",
        help="a head of these parts of ImageNet's N and K, 1 for all, step by step",
    )
    parser.add_argument("--features", type=int, default=imagenet.D, help="D of --imagenet")
    parser.add_argument("--held-out", type=int, help="examples of val, and of test, of --imagenet")
    parser.add_argument(
        "--skip", type=lambda text: tuple(text.split(",")), default=(), help="steps of --imagenet to leave out"
    )
    parser.add_argument("--doublings", type=int, default=12, help="of each axis, at most")
    parser.add_argument("--max-seconds", type=float, default=20.0, help="a job expected to take longer is left out")
    parser.add_argument(
        "--from", dest="source", choices=("memory", "disk"), default="memory", help="where the features lie"
    )
    parser.add_argument("--dir", type=Path, help="folder of the temporary feature file")
    parser.add_argument("--jobs", default=",".join(JOBS), help="which to measure, joined by commas")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the report to this file as JSON")
    parser.add_argument("--quick", action="store_true", help="one call of each job, to try the script")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.jobs.split(",") if name not in JOBS]
    if unknown:
        parser.error(f"--jobs: expected some of {', '.join(JOBS)}; got {', '.join(unknown)}")
    return arguments


def _numbers(text: str) -> list[float]:
    numbers = [float(part) for part in text.split(",")]
    if not all(0 < number <= 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected fractions above 0 up to 1; got {text!r}")
    return numbers


def _sizes(text: str) -> Sizes:
    try:
        sizes = Sizes(*(int(part) for part in text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected N,D,K, as 2000,64,10; got {text!r}") from None
    if min(sizes) < 1 or sizes.K < 2:
        raise argparse.ArgumentTypeError(f"expected N and D of at least 1 and K of at least 2; got {text!r}")
    return sizes


if __name__ == "__main__":
    main()
