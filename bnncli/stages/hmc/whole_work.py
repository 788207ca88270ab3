"""The work of hmc over other layers than the last."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.errors import DataError
from bnncli.inference.mode import covariance_at
from bnncli.inference.network_memory import NetworkDraws
from bnncli.lazy import torch
from bnncli.numerics.digests import tensor_digest
from bnncli.options.hmc import HmcOptions
from bnncli.parameters.module import ModuleLayout
from bnncli.parameters.prior import Prior
from bnncli.session.chains import network_judge
from bnncli.session.inputs import Split, open_posterior
from bnncli.session.network_splits import NetworkReader, NetworkSplit
from bnncli.session.posteriors import Base, Fitted
from bnncli.session.produce import Request
from bnncli.session.run import Run
from bnncli.stages.hmc.work import Sampling, Space
from bnncli.targets.network import NetworkTarget
from bnncli.targets.target import counted_passes

DISPERSION = (
    1.0  # chains of a network start as draws of the Gaussian: of twice that width they would take long to come back
)


@dataclass(frozen=True)
class PreparedChains:
    """A run, before its data are read.

    Attributes:
        reader: of the network and the inputs.
        layout: of the chosen parameters.
        planned_bytes: of memory, at the peak.
    """

    reader: NetworkReader
    layout: ModuleLayout
    planned_bytes: int


def prepare(run: Run, options: HmcOptions, train: Split, held_out: Split | None, base: Base | None) -> PreparedChains:
    """What will move, of the network and the first example. Raises DeviceError where the chains have no room."""
    reader = NetworkReader.of(run, options)
    with reader.recorded.visible():
        layout = reader.layout(train, options.layers)
        held = 0 if held_out is None or held_out.content.labels is None else len(held_out.content.features)
        base_bytes = 8 * int(
            registry.load_class("network_curvature", NetworkTarget.rough_structure).num_elements(layout)
        )
        if base is not None and base.is_gaussian:
            base_bytes = base.path.stat().st_size
        plan = NetworkDraws(layout, len(train.content.features), held, base_bytes)
        planned = plan.require_sampling(run.device, num_chains=options.chains, num_draws=options.draws)
    return PreparedChains(reader, layout, planned)


def fit(
    run: Run,
    options: HmcOptions,
    request: Request,
    train: Split,
    held_out: Split | None,
    *,
    prior: Prior,
    base: Base | None,
    prepared: PreparedChains,
) -> Fitted:
    """The draws with what is told of them."""
    reader = prepared.reader
    with reader.recorded.visible():
        whole = reader.split(train, options.layers)
        target = whole.target(prior, run.device)
        with counted_passes() as tally:
            center, covariance = _gaussian(run, target, whole, base)
        has_val = held_out is not None and held_out.content.labels is not None
        val = reader.split(held_out, options.layers) if held_out is not None and has_val else None
        judged_by, judged = ("train", whole) if val is None else ("heldout", val)
        space = Space(
            whole,
            target,
            center,
            covariance,
            identity=f"{covariance.structure} {tensor_digest({'center': center, **covariance.to_tensors()})}",
            dispersion=DISPERSION,
            predictions={judged_by: network_judge(run, target, judged)},
            judged_by=judged_by,
            val=val,
            meta={"layers": options.layers, **whole.layout.to_meta()},
            passes=tally.passes,
        )
        return Sampling(run, options, request, prior, space).fit()


def _gaussian(
    run: Run, target: NetworkTarget, whole: NetworkSplit, base: Base | None
) -> tuple[torch.Tensor, Covariance]:
    """The centre and the covariance that whiten: the base's where it is a Gaussian, else Kronecker factors at the network's weights."""
    if base is not None and base.is_gaussian:
        gaussian, _ = open_posterior(base.path)
        if gaussian.layout != whole.layout:
            raise DataError(f"{base.path} is over {gaussian.layout}, not {whole.layout}", code="wrong_layout")
        return gaussian.mean.to(run.device), gaussian.covariance.to(device=run.device)
    center = whole.start().to(run.device)
    return center, covariance_at(target, center, target.rough_structure)[0]
