"""The work of sbc: what is simulated, the fit made anew, the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bnncli.artifacts.headers import Header
from bnncli.errors import DeviceError, NumericError
from bnncli.evaluation.rank_uniformity import RankLaw
from bnncli.inference.simulation import Problem, quantities, ranks_of
from bnncli.lazy import torch
from bnncli.options.sbc import SbcOptions
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split, load_split, open_posterior, recorded_prior
from bnncli.session.run import Run
from bnncli.stages.sbc.fits import refit_of
from bnncli.stages.sbc.judged import RankedQuantity
from bnncli.stages.sbc.latent import latent_trial
from bnncli.stages.sbc.trial import Trial

if TYPE_CHECKING:
    from torch import Tensor


def ranked(run: Run, options: SbcOptions, train: Split, header: Header, truth: Path | None) -> list[RankedQuantity]:
    """The quantities with their ranks and p-values."""
    generator = run.stream("sbc/simulations")
    features = train.resident(run.device).float()
    rows = torch.randperm(len(features), generator=generator)[: options.examples].sort().values
    some = features[rows.to(features.device)]
    with _named(header):
        if header.meta["method"] == "lbbnn":
            trial = latent_trial(run, header, some, of_all=features, num=options.simulations, generator=generator)
        else:
            observed = None if truth is None else (features, train.labels(run.device))
            prior = recorded_prior(header)
            assert prior is not None  # checked
            num, layout = options.simulations, train.layout
            thetas = _from_prior(prior, layout, num, generator) if truth is None else _truths(truth, num, generator)
            trial = Trial(Problem(some, layout, prior, observed), thetas, refit_of(header))
        chosen = quantities(
            trial.problem.layout, _held_out(run, train, rows), run.stream("sbc/quantities"), of_labels=trial.of_labels
        )
        ranks = ranks_of(
            trial.problem,
            trial.thetas,
            trial.refit,
            ranked=chosen,
            num_draws=options.draws,
            generator=generator,
            progress=run.console,
        )
    law = RankLaw(options.simulations, options.draws)
    return [
        RankedQuantity(quantity.name, one, options.draws, law.p_value(one))
        for quantity, one in zip(chosen, ranks.numpy(), strict=True)
    ]


@contextmanager
def _named(header: Header) -> Iterator[None]:
    """A fit inside the block that fails says whose it is: the options that help are those of the posterior."""
    try:
        yield
    except (DeviceError, NumericError) as error:
        error.message = f"fitting {header.path.stem} to simulated labels: {error.message}"
        error.hint = "fit the posterior with other options" + (f": {error.hint}" if error.hint else "")
        raise


def _from_prior(prior: Prior, layout: HeadLayout, num: int, generator: torch.Generator) -> Tensor:
    """theta (M, P)."""
    normal = torch.randn(num, layout.num_params, generator=generator, dtype=torch.float64)
    return prior.center(layout) + normal / prior.diagonal(layout).sqrt()


def _truths(path: Path, num: int, generator: torch.Generator) -> Tensor:
    """theta (M, P) of a posterior; its draws again where they are fewer."""
    posterior, _ = open_posterior(path)
    drawn: Tensor = posterior.sample(num, generator).double()
    order = (
        torch.randint(len(drawn), (num,), generator=generator)
        if len(drawn) < num
        else torch.randperm(num, generator=generator)
    )
    return drawn[order]


def _held_out(run: Run, train: Split, rows: Tensor) -> Tensor:
    """Features (R, D) of examples without simulated labels: of val, or of train where there is none."""
    if run.folder.features("val").is_file():
        return load_split(run, "val").features(torch.device("cpu"))
    features = train.features(torch.device("cpu"))
    others = torch.ones(len(features), dtype=torch.bool)
    others[rows] = False
    return features[others] if bool(others.any()) else features
