"""Active learning with the commands: train, extract-features, fit-laplace, acquire, and again with what was acquired.

A network is trained from scratch on a few labelled images; its last-layer posterior says which images of a pool to label next (their
labels are in the file and are looked up). Accuracy on test images against the number of labels, for several rules and seeds: all
rules of a seed begin with the same labelled images.

    python benchmarks/active_learning.py fmnist-train.npz fmnist-test.npz --seeds 3 --plot curves.png --out active.json
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("BNNCLI_THREADS", "1")

from bnncli.cli.execute import run_command_line
from bnncli.figures.fits import MeasuredLine, draw_measured_lines

RULES = ("random", "entropy", "bald", "batchbald")
SCHEMA = "bnncli.benchmark.active-learning/1"
Array = np.ndarray


def main() -> None:
    """Run, print, draw."""
    arguments = _parse()
    pool, test = (
        _images(path, count)
        for path, count in ((arguments.train, arguments.pool), (arguments.test, arguments.held_out))
    )
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        for rule in arguments.rules.split(","):
            before = time.perf_counter()
            found = _loop(rule, seed, pool, test, arguments)
            rows += [{"rule": rule, "seed": seed, **row} for row in found]
            shown = " ".join(f"{row['accuracy']:.3f}" for row in found)
            print(f"seed {seed} {rule:<10} {shown}   {time.perf_counter() - before:.0f} s", file=sys.stderr, flush=True)
    _print(rows)
    if arguments.plot:
        arguments.plot.write_bytes(_figure(rows, arguments.plot.suffix[1:]))
    if arguments.out:
        settings = {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)}
        arguments.out.write_text(json.dumps({"schema": SCHEMA, "settings": settings, "rows": rows}, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", type=Path, help="npz of x and y, of which the pool is the first rows")
    parser.add_argument("test", type=Path, help="npz of x and y")
    parser.add_argument("--pool", type=int, default=5000, help="images to choose from")
    parser.add_argument("--held-out", type=int, default=5000, help="test images")
    parser.add_argument("--first", type=int, default=50, help="labelled images to begin with")
    parser.add_argument("--batch", type=int, default=25, help="images a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=60, help="of every training, which starts anew")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--plot", type=Path, help="figure of the curves: png, pdf or svg")
    parser.add_argument("--out", type=Path, help="JSON of every number")
    return parser.parse_args()


def _images(path: Path, count: int) -> dict[str, Array]:
    with np.load(path) as file:
        return {"x": file["x"][:count], "y": file["y"][:count]}


def _loop(
    rule: str, seed: int, pool: dict[str, Array], test: dict[str, Array], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Accuracies after each round of one rule."""
    chosen = np.random.default_rng(seed).permutation(len(pool["y"]))[: arguments.first]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        np.savez(folder / "pool.npz", x=pool["x"])
        np.savez(folder / "test.npz", **test)
        for number in range(arguments.rounds + 1):
            net = folder / f"net-{number}.safetensors"
            np.savez(folder / f"labelled-{number}.npz", x=pool["x"][chosen], y=pool["y"][chosen])
            data = f"train=npz:{folder}/labelled-{number}.npz"
            _run(
                "train",
                net,
                "--model",
                "lenet5",
                "--data",
                data,
                "--epochs",
                arguments.epochs,
                "--batch-size",
                32,
                "--seed",
                seed,
            )
            splits = ("--data", data, "--data", f"pool=npz:{folder}/pool.npz", "--data", f"test=npz:{folder}/test.npz")
            _run("extract-features", net, *splits)
            _run("fit-laplace", net, "--structure", "kron", "--prior-precision", "marglik")
            _run("predict", net, "--posterior", "laplace", "--split", "test")
            scores = _run("evaluate", net, "--posterior", "laplace", "--split", "test", "--bootstrap", 0)["rows"][0][
                "metrics"
            ]
            values = {score["name"]: score["value"] for score in scores if score["name"] in ("accuracy", "nll")}
            rows.append({"labels": len(chosen), **values})
            if number < arguments.rounds:
                (folder / "done.txt").write_text("\n".join(map(str, chosen)) + "\n")
                words = (
                    "--by",
                    rule,
                    "--batch",
                    arguments.batch,
                    "--exclude",
                    folder / "done.txt",
                    "--seed",
                    100 * seed + number,
                )
                new = _run("acquire", net, "--pool", "pool", "--posterior", "laplace", *words)["rows"]
                chosen = np.concatenate([chosen, [row["sample_id"] for row in new]])
    return rows


def _run(*words: object) -> dict[str, Any]:
    out = io.StringIO()
    code = run_command_line([*map(str, words), "--json", "--quiet"], out)
    if code:
        sys.exit(f"bnncli {' '.join(map(str, words))}: {out.getvalue()}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def _curves(rows: list[dict[str, Any]]) -> dict[str, MeasuredLine]:
    """Mean accuracy over seeds, and its standard error, by rule."""
    curves = {}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        labels = sorted({row["labels"] for row in rows})
        values = [
            np.array([row["accuracy"] for row in rows if (row["rule"], row["labels"]) == (rule, count)])
            for count in labels
        ]
        errors = [float(one.std(ddof=1) / np.sqrt(len(one))) if len(one) > 1 else None for one in values]
        curves[rule] = MeasuredLine(labels, [float(one.mean()) for one in values], errors)
    return curves


def _print(rows: list[dict[str, Any]]) -> None:
    curves = _curves(rows)
    print("| labels | " + " | ".join(curves) + " |")
    print("|---|" + "---|" * len(curves))
    for place, count in enumerate(next(iter(curves.values())).x):
        cells = []
        for line in curves.values():
            error = line.errors[place]
            cells.append(f"{line.values[place]:.3f}" + ("" if error is None else f" ± {error:.3f}"))
        print(f"| {count} | " + " | ".join(cells) + " |")


def _figure(rows: list[dict[str, Any]], form: str) -> bytes:
    figure = draw_measured_lines(_curves(rows), title="Active learning", x_label="labels", y_label="test accuracy")
    stream = io.BytesIO()
    figure.savefig(stream, format=form, dpi=150)
    return stream.getvalue()


if __name__ == "__main__":
    main()
