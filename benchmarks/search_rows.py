"""Whether the prior precision that val prefers depends on how many examples the search reads.

Features of `scaling.py --imagenet` (its generator, its trained head). Each row searches by so many of the training examples, then
fits all of them at what was found; the loss on test is of that fit, by draws of the logits.

    python benchmarks/search_rows.py --sizes 100,128,10000,2000 --examples 10000,5000,2500,1200
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import imagenet
import numpy as np
import torch

from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.prior_criterion import losses_by_logits
from bnncli.inference.prior_search import search
from bnncli.numerics.random import stream
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget

SCHEMA = "bnncli.benchmark.search-rows/1"
NUM_DRAWS = 128


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="100,128,10000,2000", metavar="K,D,N,M", help="M examples of val, and of test"
    )
    parser.add_argument("--examples", default="10000,5000,2500,1200", help="that the searches read")
    parser.add_argument("--out", type=Path, help="write the report to this file as JSON")
    arguments = parser.parse_args()
    classes, size, count, held_out = map(int, arguments.sizes.split(","))
    layout = HeadLayout(classes, size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npz"
        accuracy = imagenet.write_features(path, imagenet.Scale(count, held_out, layout), torch.device("cpu"))
        arrays = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    print(f"K = {classes}, D = {size}, N = {count}; the head is right for {accuracy:.1%}")
    start = layout.join(arrays["head_weight"][None], arrays["head_bias"][None])[0].double()
    target = LastLayerTarget(arrays["features_train"].float(), arrays["labels_train"], layout, Prior(1.0))
    val, test = (target.held_out(arrays[f"features_{s}"].float(), arrays[f"labels_{s}"]) for s in ("val", "test"))
    print(f"{'examples':>9}{'a class':>9}{'precision':>11}{'CPU s':>8}{'test NLL of the fit of all':>28}")
    rows = []
    for wanted in map(int, arguments.examples.split(",")):
        chosen = torch.randperm(count, generator=stream(0, "bench/rows"))[:wanted].sort().values
        before = time.process_time()
        found = search(
            target.some(chosen), start=start, generator=stream(0, "bench/val"), structure="kron", criterion="val",
            held_out=val, is_large=True,
        )  # fmt: skip
        seconds = time.process_time() - before
        gaussian = fit_gaussian(target.with_prior(Prior(found.best)), start=start, structure="kron").gaussian
        noise = torch.randn(NUM_DRAWS, classes, generator=stream(0, "bench/test"), dtype=torch.float64)
        loss = float(losses_by_logits(test, target, gaussian.mean, gaussian.covariance, noise=noise).mean())
        rows.append({"examples": wanted, "precision": found.best, "cpu_seconds": seconds, "test_nll": loss})
        print(f"{wanted:>9}{wanted / classes:>9.1f}{found.best:>11.4g}{seconds:>8.1f}{loss:>28.4f}", flush=True)
    if arguments.out:
        report = {"schema": SCHEMA, "sizes": arguments.sizes, "accuracy": accuracy, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
