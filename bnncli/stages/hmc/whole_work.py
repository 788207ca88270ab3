"""The work of hmc over other layers than the last."""

from __future__ import annotations

from functools import partial

import torch

from bnncli.covariances import Covariance
from bnncli.errors import DataError
from bnncli.evaluation.convergence import Convergence
from bnncli.evaluation.predictive_convergence import label_convergence
from bnncli.inference import memory
from bnncli.inference.local_covariance import covariance_at
from bnncli.numerics.digests import tensor_digest
from bnncli.options import HmcOptions
from bnncli.run.inputs import Split, open_posterior
from bnncli.run.network_splits import NetworkReader, NetworkSplit
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted
from bnncli.run.session import Run
from bnncli.stages.hmc.base import Base, require_room
from bnncli.stages.hmc.work import Sampling, Space, judged_rows
from bnncli.storage.atomic import check_free_space
from bnncli.targets.network import HeldOutInputs, NetworkTarget
from bnncli.theta.prior import Prior

DISPERSION = (
    1.0  # chains of a network start as draws of the Gaussian: of twice that width they would take long to come back
)


def fit(
    run: Run,
    options: HmcOptions,
    request: Request,
    train: Split,
    held_out: Split | None,
    *,
    prior: Prior,
    base: Base | None,
) -> Fitted:
    """The draws with what is told of them."""
    reader = NetworkReader.of(run, options)
    with reader.recorded.visible():
        layout = reader.layout(train, options.layers)  # of the first example: before all of them are read
        require_room(run, options, train, layout)
        whole = reader.split(train, options.layers)
        num_params = layout.num_params
        check_free_space(request.target.parent, memory.sampled_bytes(num_params, options.chains * options.draws))
        target = whole.target(prior, run.device)
        center, covariance = _gaussian(run, target, whole, base)
        judged_by, judged = "train", whole
        if held_out is not None and held_out.content.labels is not None:
            judged_by, judged = "heldout", reader.split(held_out, options.layers)
        space = Space(
            whole,
            target,
            center,
            covariance,
            identity=f"{covariance.structure} {tensor_digest({'center': center, **covariance.to_tensors()})}",
            dispersion=DISPERSION,
            predictions={judged_by: partial(_judge, run, _labelled(run, target, judged))},
            judged_by=judged_by,
            meta={"layers": options.layers, **whole.layout.to_meta()},
        )
        return Sampling(run, options, request, prior, space).fit()


def _gaussian(
    run: Run, target: NetworkTarget, whole: NetworkSplit, base: Base | None
) -> tuple[torch.Tensor, Covariance]:
    """The centre and the covariance that whiten: the base's where it is a Gaussian, else Kronecker factors at the network's weights."""
    if base is not None and base.header.meta.get("type") == "gaussian":
        gaussian, _ = open_posterior(base.path)
        if gaussian.layout != whole.layout:
            raise DataError(f"{base.path} is over {gaussian.layout}, not {whole.layout}", code="wrong_layout")
        return gaussian.mean.to(run.device), gaussian.covariance.to(device=run.device)
    center = whole.start().to(run.device)
    return center, covariance_at(target, center, target.rough_structure)[0]


def _labelled(run: Run, target: NetworkTarget, split: Split) -> HeldOutInputs:
    """A few hundred seeded examples of a split, with their labels."""
    rows = judged_rows(run, split)
    return target.held_out(split.stored[rows].to(run.device), split.labels(run.device)[rows.to(run.device)])


def _judge(run: Run, examples: HeldOutInputs, draws: torch.Tensor) -> Convergence:
    """How the chains agree on the examples' labels."""
    return label_convergence(draws, examples, progress=run.console)
