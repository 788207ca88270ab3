"""What each kind of work takes of memory, measured from where it starts, in a process that does nothing else."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kills import SERVER
from torch import Tensor

from bnncli.artifacts.samples import SampleFile, write_samples
from bnncli.flows.affine import Affine
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.inference.row_space import RowLift, lift_fit
from bnncli.integrators.mc import Mc
from bnncli.latent.factors import initial_factors, initial_model
from bnncli.latent.fit import EstimatorSettings, Plan, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.session.inputs import open_samples
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace

# Larger arrays get pages of their own, so that what is freed is seen to be free; smaller ones keep the pages they had.
MMAP_THRESHOLD, OWN_PAGES = -3, 1_000_000
Cases = tuple[dict[str, Any], tuple[int, int], list[Any], list[Any], tuple[int, ...]]


def peaks_of(cases: Cases, folder: Path) -> dict[str, int]:
    """Peaks of all the work, bytes, by what names it: a process forked from SERVER does it."""
    process = SERVER.Process(target=_measure, args=(cases, folder / "peaks.json"))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    return json.loads((folder / "peaks.json").read_text())


def _measure(cases: Cases, path: Path) -> None:
    """In the child: the work, small work of each kind first, which loads libraries."""
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, OWN_PAGES) == 1
    fits, chains, networks, flows, draws = cases
    _fit("full", 10, 30), _fit("kron", 10, 300)
    found = {structure: _peak(_fit, structure, *sizes) for structure, sizes in fits.items()}
    _sample(9, 5)
    found["hmc"] = _peak(_sample, *chains)
    _fit_in_span(_target(HeadLayout(2, 400)))
    found["span"] = _peak(_fit_in_span, _target(HeadLayout(3, 3000)))
    _invert(10, 30, 3)
    found["inverse"] = _peak(_invert, 400, 199, 3)
    _flow_peak(10, 30, "kron")
    found |= {named(case): _flow_peak(*case) for case in flows}
    _fit_network((5, 4), 1, 10, "lrt")
    found |= {named(case): _peak(_fit_network, *case) for case in networks}
    found |= _held_by_draws(path.with_name("draws.nc"), *draws)
    path.write_text(json.dumps(found))


def named(case: tuple[object, ...]) -> str:
    """A case's name among the peaks."""
    return str(case)


def now(name: str) -> int:
    """A figure of this process's memory, bytes."""
    found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def _peak(work: Callable[..., Any], *words: Any) -> int:
    ctypes.CDLL(None).malloc_trim(0)  # nothing that is free already is taken
    start = now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    result = work(*words)
    peak = now("VmHWM") - start
    del result
    return peak


def _target(layout: HeadLayout, count: int = 300) -> LastLayerTarget:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(layout.num_outputs, (count,), generator=generator)
    return LastLayerTarget(torch.randn(count, layout.num_features, generator=generator), labels, layout, Prior(100.0))


def _fit(structure: str, *sizes: int) -> Gaussian:
    return _fitted(_target(HeadLayout(*sizes)), structure)


def _fitted(one: LastLayerTarget, structure: str) -> Gaussian:
    result = fit_gaussian(one, start=torch.zeros(one.layout.num_params, dtype=torch.float64), structure=structure)
    result.gaussian.covariance.to_tensors()
    return result.gaussian


def _sample(num_features: int, num_chains: int) -> Any:
    one = _target(HeadLayout(10, num_features))
    base, generator = _fitted(one, "full"), torch.Generator().manual_seed(0)
    plan = {"num_chains": num_chains, "num_warmup": 1, "num_draws": 1}
    return sample_hmc(one, mode=base.mean, covariance=base.covariance, generator=generator, **plan)


def _fit_in_span(one: LastLayerTarget) -> None:
    rows = RowSpace.of(one.features, one.layout)
    start = torch.zeros(rows.reduced.num_params, dtype=torch.float64)
    lift_fit(
        fit_gaussian(rows.target(one), start=start, structure="full"), RowLift(rows, one.prior)
    ).gaussian.to_tensors()


def _fit_network(sizes: tuple[int, ...], repeats: int, batch_size: int, estimator: str) -> None:
    layout, generator = NetworkLayout(sizes), torch.Generator().manual_seed(0)
    factors = initial_factors(layout, repeats, generator)
    flows = [initial_model(n, repeats, generator) for _, n in layout.shapes] if estimator == "mnf" else []
    model = LatentModel(layout, factors, SpikeAndSlab.constant(layout.num_layers), tuple(flows))
    features, labels = torch.randn(2 * batch_size, sizes[0]), torch.randint(0, sizes[-1], (2 * batch_size,))
    plan = Plan(epochs=2, batch_size=batch_size, learning_rate=1e-3, settings=EstimatorSettings(estimator))
    fit_latent(model, features, labels, plan, generator=generator)


def _held_by_draws(path: Path, *sizes: int) -> dict[str, int]:
    """Bytes held when draws that were read are ready to predict, all of them and the chosen ones."""
    chains, draws, outputs, features, chosen = sizes
    weight = np.random.default_rng(0).normal(size=(chains, draws, outputs, features)).astype(np.float32)
    content = SampleFile(weight, np.zeros(weight.shape[:3], np.float32), {"lp": np.zeros((chains, draws))}, {})
    texts = {"outputs": [str(k) for k in range(outputs)], "created_at": "", "name": "", "sampler_library": ("", "")}
    provenance = {"params_hash": "", "params": {}, "algo_rev": 1, "command": ["bnncli"], "inputs": []}
    write_samples(path, content, **texts, meta={}, provenance=provenance, may_replace=False)
    del weight, content
    inputs, found = torch.randn(5, features), {}
    for used in (chains * draws, chosen):
        ctypes.CDLL(None).malloc_trim(0)
        start = now("RssAnon")  # the file's own pages can be taken back
        posterior = open_samples(path)[0]
        drawn = Mc().prepare(posterior, num_samples=used, generator=torch.Generator())
        ready = drawn._draws(inputs)
        found[named((*sizes, used))] = now("RssAnon") - start
        del posterior, drawn, ready
    return found


def _refine(one: LastLayerTarget, base: Gaussian, scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    fit_flow(one, base, generator=generator, flow="affine", epochs=2, settings={"scale": scale})


def _invert(num_outputs: int, num_features: int, num_draws: int) -> Tensor:
    """The inverse of an affine layer at so many points, and a score pushed through it."""
    layer = Affine(HeadLayout(num_outputs, num_features), torch.Generator().manual_seed(0))
    with torch.no_grad():
        return layer.push_score(layer.inverse(torch.randn(num_draws, layer.layout.num_params, dtype=torch.float64)))


def _flow_peak(num_outputs: int, num_features: int, scale: str) -> int:
    one = _target(HeadLayout(num_outputs, num_features), 100)
    return _peak(_refine, one, _fitted(one, "diag"), scale)
