"""What each kind of work takes of memory, measured from where it starts, in a process that does nothing else."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kills import SERVER
from torch import Tensor

from bnncli.cli.execute import run_command_line
from bnncli.flows.affine import Affine
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.inference.row_space import RowLift, lift_fit
from bnncli.latent.factors import initial_factors, initial_model
from bnncli.latent.fit import EstimatorSettings, Plan, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace

# Larger arrays get pages of their own, so that what is freed is seen to be free; smaller ones keep the pages they had.
MMAP_THRESHOLD, OWN_PAGES = -3, 1_000_000


def peak_of(name: str, sizes: tuple[Any, ...], folder: Path) -> int:
    """The peak of a work of this module, bytes, in a process forked from SERVER."""
    process = SERVER.Process(target=_measure, args=(name, sizes, folder / "peak.json"))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == 0
    return json.loads((folder / "peak.json").read_text())


def _measure(name: str, sizes: tuple[Any, ...], path: Path) -> None:
    """In the child: small work first, which loads libraries."""
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, OWN_PAGES) == 1
    prepare, small = WORKS[name]
    prepare(*small)()
    work = prepare(*sizes)
    ctypes.CDLL(None).malloc_trim(0)  # nothing that is free already is taken
    start = now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    result = work()
    path.write_text(json.dumps(now("VmHWM") - start))
    del result


def peak_of_command(words: tuple[Any, ...], folder: Path) -> tuple[int, int]:
    """What a command expects to need of memory, bytes, and its peak above what its process had before."""
    process = SERVER.Process(target=_run, args=([*map(str, words), "--threads", "1", "-v"], folder / "peak.json"))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == 0
    told, peak = json.loads((folder / "peak.json").read_text())
    found = re.search(r"the process uses ([\d.]+) MiB of memory, the work needs about ([\d.]+) MiB more", told)
    assert found, told
    before, planned = (round(float(text) * 2**20) for text in found.groups())
    return planned, peak - before


def _run(words: list[str], path: Path) -> None:
    """In the child: the command, and its peak."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # as the command does; read by the first large tensor
    with path.with_suffix(".txt").open("w+") as sys.stderr:
        code = run_command_line(words, io.StringIO())
        sys.stderr.seek(0)
        told = sys.stderr.read()
    assert code == 0, told
    path.write_text(json.dumps([told, now("VmHWM")]))


def now(name: str) -> int:
    """A figure of this process's memory, bytes."""
    found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def _target(layout: HeadLayout, count: int = 300) -> LastLayerTarget:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(layout.num_outputs, (count,), generator=generator)
    return LastLayerTarget(torch.randn(count, layout.num_features, generator=generator), labels, layout, Prior(100.0))


def _fitted(one: LastLayerTarget, structure: str) -> Gaussian:
    result = fit_gaussian(one, start=torch.zeros(one.layout.num_params, dtype=torch.float64), structure=structure)
    result.gaussian.covariance.to_tensors()
    return result.gaussian


def _fit(structure: str, *sizes: int) -> Callable[[], Any]:
    one = _target(HeadLayout(*sizes))
    return lambda: _fitted(one, structure)


def _sample(num_features: int, num_chains: int) -> Callable[[], Any]:
    one = _target(HeadLayout(10, num_features))
    plan = {"num_chains": num_chains, "num_warmup": 1, "num_draws": 1}

    def work() -> Any:
        base = _fitted(one, "full")
        generator = torch.Generator().manual_seed(0)
        return sample_hmc(one, mode=base.mean, covariance=base.covariance, generator=generator, **plan)

    return work


def _fit_in_span(*sizes: int) -> Callable[[], Any]:
    one = _target(HeadLayout(*sizes))

    def work() -> Any:
        rows = RowSpace.of(one.features, one.layout)
        start = torch.zeros(rows.reduced.num_params, dtype=torch.float64)
        fit = fit_gaussian(rows.target(one), start=start, structure="full")
        return lift_fit(fit, RowLift(rows, one.prior)).gaussian.to_tensors()

    return work


def _refine(num_outputs: int, num_features: int, scale: str) -> Callable[[], Any]:
    one, generator = _target(HeadLayout(num_outputs, num_features), 100), torch.Generator().manual_seed(0)
    base = _fitted(one, "diag")
    return lambda: fit_flow(one, base, generator=generator, flow="affine", epochs=2, settings={"scale": scale})


def _fit_latent(sizes: tuple[int, ...], repeats: int, batch_size: int, estimator: str) -> Callable[[], Any]:
    layout, generator = NetworkLayout(sizes), torch.Generator().manual_seed(0)
    features, labels = torch.randn(2 * batch_size, sizes[0]), torch.randint(0, sizes[-1], (2 * batch_size,))
    plan = Plan(epochs=2, batch_size=batch_size, learning_rate=1e-3, settings=EstimatorSettings(estimator))

    def work() -> Any:
        factors = initial_factors(layout, repeats, generator)
        flows = [initial_model(n, repeats, generator) for _, n in layout.shapes] if estimator == "mnf" else []
        model = LatentModel(layout, factors, SpikeAndSlab.constant(layout.num_layers), tuple(flows))
        return fit_latent(model, features, labels, plan, generator=generator)

    return work


def _invert(num_outputs: int, num_features: int, num_draws: int) -> Callable[[], Tensor]:
    """The inverse of an affine layer at so many points, and a score pushed through it."""

    def work() -> Tensor:
        layer = Affine(HeadLayout(num_outputs, num_features), torch.Generator().manual_seed(0))
        with torch.no_grad():
            return layer.push_score(layer.inverse(torch.randn(num_draws, layer.layout.num_params, dtype=torch.float64)))

    return work


WORKS: dict[str, tuple[Callable[..., Callable[[], Any]], tuple[Any, ...]]] = {
    "fit": (_fit, ("kron", 10, 300)),
    "hmc": (_sample, (9, 5)),
    "span": (_fit_in_span, (2, 400)),
    "refine": (_refine, (10, 30, "kron")),
    "lbbnn": (_fit_latent, ((5, 4), 1, 10, "lrt")),
    "inverse": (_invert, (10, 30, 3)),
}
