"""The verdict on the posteriors of a run: which fits its target well enough to use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.comparison import skewed_interval
from bnncli.evaluation.convergence import GOOD_RHAT, STUCK_ACCEPTANCE
from bnncli.lazy import special
from bnncli.names import count_noun, percent
from bnncli.parameters.module import ALL
from bnncli.parameters.prior import Prior

ERROR_RATE = 0.01
LOOKS = 5
# Moving a Gaussian by one standard deviation along one of its P directions changes the ELBO by half a nat. The handful
# of draws that predictions are made from cannot resolve this.
NEGLIGIBLE_NATS = 0.5
NUM_STANDARD_ERRORS = 3.0
VERDICTS = ("helped", "hurt", "negligible", "undecided")


@cache
def reach(num_draws: int) -> float:
    """Return the margin in standard errors: the quantile of Student's t at the level of three normal standard errors.

    Args:
        num_draws: number of draws behind the standard error, at least 2.
    """
    return float(-special.stdtrit(num_draws - 1, special.ndtr(-NUM_STANDARD_ERRORS)))


def judge_gain(
    gain: float, standard_error: float, num_draws: int, *, is_last: bool, skewness: float = 0.0
) -> str | None:
    """Return one of VERDICTS, or None if more draws are needed and available.

    A significant gain that is not yet known to exceed half a nat waits for more draws; at the last look it counts as
    "helped" or "hurt".

    Args:
        gain: nats.
        standard_error: standard error of the gain, from num_draws draws.
        is_last: no more draws are available.
        skewness: skewness of the draws.
    """
    low, high = skewed_interval(gain, standard_error, skewness, num_draws, reach(num_draws))
    if low > -NEGLIGIBLE_NATS and high < NEGLIGIBLE_NATS:
        return "negligible"
    if (low > 0 or high < 0) and (abs(gain) >= NEGLIGIBLE_NATS or is_last):
        return "helped" if gain > 0 else "hurt"
    return "undecided" if is_last else None


LOW_BFMI = 0.3  # Stan's warning threshold


def bfmi(energy: NDArray) -> NDArray[np.float64]:
    """Return the E-BFMI (C,) of chains from their energies (C, T), nats; NaN for a chain whose energy is constant.

    Raises:
        ValueError: the energies have another shape or fewer than two draws per chain.
    """
    if energy.ndim != 2 or energy.shape[1] < 2:
        raise ValueError(f"energy: expected shape (C, T) with T at least 2, got {energy.shape}")
    values = energy.astype(np.float64)
    variance = values.var(axis=1, ddof=1)
    steps = np.square(np.diff(values, axis=1)).mean(axis=1)
    return np.divide(steps, variance, out=np.full(len(values), np.nan), where=variance > 0)


def lowest_bfmi(energy: NDArray) -> float:
    """Return the lowest E-BFMI of chains with energies (C, T); a chain of constant energy explores nothing and counts as 0."""
    return float(np.nan_to_num(bfmi(energy), nan=0.0).min())


CLOSE_LOG_WEIGHT_SD = 2.0  # nats; the KL divergence of log-normal weights is half its square
GOOD_ESS = 400.0  # Vehtari et al. (2021), section 4: below it, the diagnostics themselves are noise
_EXACT_SD = 1e-6  # nats; the weights are equal, so no tail can be fitted
_SHOWN_P = 0.01  # below it, draws differ significantly
DENSITIES = ("gaussian", "flow")
LINEAR_DRAWS = "linear-draws"
POINTS = ("point", "sparse", "calibrated")


@dataclass(frozen=True)
class PosteriorFacts:
    """The measured facts about one posterior; None if undefined for its type.

    Args:
        name: name of the artifact.
        type: point, gaussian, flow, samples, latent-binary or sparse.
        target: prior of the log posterior it was fitted to.
        layers: its parameters as the user named them; None for the last layer.
        elbo, elbo_error: nats.
        log_weight_sd, pareto_k, k_threshold: of its importance weights.
        shortfall: nats by which its ELBO is below the maximum, if the fit found this to be large.
        r_hat, ess_bulk, ess_tail, divergences, lowest_acceptance, lowest_bfmi: of its chains.
        is_exact: whether its draws converge to the target's distribution; False for samplers that accept every move.
        reference, mmd2, mmd_p: good draws of the same target it was compared with, distance, and p-value.
        is_worse: it predicts val significantly worse than the network at one temperature.
        is_tuned: its prior precision was chosen by val NLL.
        num_varying: number of varying parameters, if it fixes all others; else None.
        fit_on: splits it was fitted to.
    """

    name: str
    type: str
    target: Prior | None = None
    layers: str | None = None
    elbo: float | None = None
    elbo_error: float | None = None
    log_weight_sd: float | None = None
    pareto_k: float | None = None
    k_threshold: float = 0.7
    shortfall: float | None = None
    r_hat: float | None = None
    ess_bulk: float | None = None
    ess_tail: float | None = None
    divergences: int | None = None
    lowest_acceptance: float | None = None
    lowest_bfmi: float | None = None
    is_exact: bool = True
    reference: str | None = None
    mmd2: float | None = None
    mmd_p: float | None = None
    is_worse: bool = False
    is_tuned: bool = False
    num_varying: int | None = None
    fit_on: str = "train"

    @property
    def aim(self) -> tuple[str | None, Prior | None, str]:
        """The log posterior it was fitted to: parameters, prior, and splits."""
        return self.layers, self.target, self.fit_on


@dataclass(frozen=True)
class Commands:
    """Commands to paste: predict with a posterior, sample the target of one, fit a Gaussian, tune the prior on val."""

    predict: Callable[[str], str]
    sample: Callable[[PosteriorFacts], str]
    fit: str
    tune: str


@dataclass(frozen=True)
class Verdict:
    """Posterior to use, and why.

    Args:
        sentence: for people.
        use: name of the posterior that fits its target; None if none is good.
        target: prior that the sentence refers to.
        is_good: whether any posterior is good for its target.
        run: command to run next.
    """

    sentence: str
    use: str | None
    target: Prior | None
    is_good: bool
    run: str


def reasons_against(judged: PosteriorFacts) -> list[str]:
    """Return the reasons why a posterior does not fit its target; empty if it is good. Only this function defines good."""
    if judged.type == "samples":
        return _doubts_of_chains(judged)
    if judged.type in POINTS:
        return [f"a {judged.type} posterior is a single point, not a distribution"]
    if judged.type == LINEAR_DRAWS:
        return ["draws of an implicit Gaussian have no density"]
    if judged.type == "ensemble":
        return ["separately trained networks have no density and no target"]
    if judged.type == "stack":
        return ["a mixture of last layers has no density"]
    if judged.type not in DENSITIES:
        return [f"a {judged.type} posterior has its own prior, and so another target"]
    if judged.num_varying is not None:
        return [f"it fixes all but {judged.num_varying:,} parameters"]
    if judged.log_weight_sd is None:
        return ["its importance weights are undefined"]
    found = []
    if judged.log_weight_sd > CLOSE_LOG_WEIGHT_SD:
        found.append(f"log-weight sd {judged.log_weight_sd:.3g} (above {CLOSE_LOG_WEIGHT_SD:g})")
    if judged.pareto_k is None and judged.log_weight_sd > _EXACT_SD:
        found.append("Pareto k unknown")
    if judged.pareto_k is not None and judged.pareto_k > judged.k_threshold:
        found.append(f"Pareto k {judged.pareto_k:.2f} (above {judged.k_threshold:.2f})")
    if judged.shortfall is not None:
        found.append(f"its ELBO is about {judged.shortfall:.3g} nats below its maximum")
    return found


def give_verdict(posteriors: Sequence[PosteriorFacts], commands: Commands, prediction: str) -> Verdict:
    """Return the verdict on posteriors, given in order of preference among equals.

    Args:
        prediction: what to predict with, as a clause.
    """
    distributions = [judged for judged in posteriors if judged.type in DENSITIES or judged.type == "samples"]
    aims = list(dict.fromkeys(judged.aim for judged in distributions))
    choices = {aim: _choose([j for j in distributions if j.aim == aim]) for aim in aims}
    aim = next((one for one in aims if choices[one] is not None), aims[0] if aims else (None, None, ""))
    use = choices.get(aim)
    layers, target, _ = aim
    over = "" if layers is None else f"over {layers} layers " if layers == ALL else f"over {layers} "
    where = f"{over}at prior precision {target}, " if len(aims) > 1 and target is not None else ""
    fit, command = _fit_clause([j for j in distributions if j.aim == aim], use, commands)
    bad_prior = ""
    if use is not None and use.is_worse and not use.is_tuned:
        bad_prior = (
            f"; warning: {use.name} predicts val worse than temperature scaling: choose its prior on val "
            f"({commands.tune})"
        )
    return Verdict(
        sentence=f"{where}{fit}; {prediction}{bad_prior}",
        use=use.name if use else None,
        target=target,
        is_good=use is not None,
        run=command,
    )


def _doubts_of_chains(judged: PosteriorFacts) -> list[str]:
    found = [] if judged.is_exact else ["it accepts every move, which biases its draws"]
    if judged.r_hat is None:
        found.append("R-hat undefined")
    elif judged.r_hat > GOOD_RHAT:
        found.append(f"R-hat {judged.r_hat:.3f} (above {GOOD_RHAT})")
    sizes = [size for size in (judged.ess_bulk, judged.ess_tail) if size is not None]
    if sizes and min(sizes) < GOOD_ESS:
        found.append(f"ESS {min(sizes):.0f} (below {GOOD_ESS:.0f})")
    if judged.divergences:
        found.append(count_noun(judged.divergences, "divergence"))
    if judged.lowest_acceptance is not None and judged.lowest_acceptance < STUCK_ACCEPTANCE:
        found.append(f"a chain accepts only {percent(judged.lowest_acceptance)} of its moves")
    if judged.lowest_bfmi is not None and judged.lowest_bfmi < LOW_BFMI:
        found.append(f"E-BFMI {judged.lowest_bfmi:.2f} (below {LOW_BFMI})")
    return found


def _choose(same_target: Sequence[PosteriorFacts]) -> PosteriorFacts | None:
    """Return the good posterior to use: the simplest density whose ELBO matches the best one's, else chains."""
    good = [judged for judged in same_target if not reasons_against(judged)]
    densities = [judged for judged in good if judged.type in DENSITIES]
    if not densities:
        return max(good, key=lambda judged: judged.ess_bulk or 0.0, default=None)
    highest = _highest_elbo(densities)
    return next(
        judged
        for kind in DENSITIES
        for judged in densities
        if judged.type == kind and (judged is highest or _elbo_gap(highest, judged) <= 0)
    )


def _highest_elbo(densities: Sequence[PosteriorFacts]) -> PosteriorFacts:
    return max(densities, key=lambda judged: -math.inf if judged.elbo is None else judged.elbo)


def _elbo_gap(highest: PosteriorFacts, other: PosteriorFacts) -> float:
    """Return the nats by which other's ELBO is lower than noise and indifference allow; at most 0 if it is not."""
    noise = NUM_STANDARD_ERRORS * math.hypot(highest.elbo_error or 0.0, other.elbo_error or 0.0)
    return (highest.elbo or 0.0) - (other.elbo or 0.0) - max(NEGLIGIBLE_NATS, noise)


def _fit_clause(
    same_target: Sequence[PosteriorFacts], use: PosteriorFacts | None, commands: Commands
) -> tuple[str, str]:
    """Return a clause about the fit to the target, and the command to run next."""
    densities = [judged for judged in same_target if judged.type in DENSITIES]
    far = ""
    if densities:
        closest = _highest_elbo(densities)
        far = f"no Gaussian or flow matches the exact posterior (best: {closest.name}, {_weights(closest)})"
    if use is None:
        return _nothing_good(same_target, far, commands)
    predict = commands.predict(use.name)
    if use.type == "samples":
        start = f"{far}; " if far else ""
        return f"{start}{use.name} has converged to the exact posterior ({_chains(use)})", predict
    numbers = _weights(use)
    close = "matches the exact posterior closely"
    if use.reference is not None and use.mmd2 is not None:
        shown = "p unknown" if use.mmd_p is None else f"p {use.mmd_p:.2g}"
        numbers += f", MMD^2 to {use.reference} {use.mmd2:.4f}, {shown}"
        if use.mmd_p is not None and use.mmd_p > _SHOWN_P:
            close = "matches the exact posterior as closely as draws can show"
    return f"{use.name} {close} ({numbers})", predict


def _nothing_good(same_target: Sequence[PosteriorFacts], far: str, commands: Commands) -> tuple[str, str]:
    if not same_target:
        return f"no Gaussian, flow or draws to compare: run {commands.fit}", commands.fit
    chains = [judged for judged in same_target if judged.type == "samples"]
    bad = [f"{judged.name} has not converged ({', '.join(reasons_against(judged))})" for judged in chains]
    command = commands.sample(same_target[0])
    return f"{' and '.join([far] * bool(far) + bad)}: run {command}", command


def _weights(judged: PosteriorFacts) -> str:
    if judged.num_varying is not None:
        return reasons_against(judged)[0]
    if judged.log_weight_sd is None:
        return "importance weights undefined"
    shown = "" if judged.pareto_k is None else f", Pareto k {judged.pareto_k:.2f}"
    return f"log-weight sd {judged.log_weight_sd:.2f}{shown}"


def _chains(judged: PosteriorFacts) -> str:
    r_hat = "undefined" if judged.r_hat is None else f"{judged.r_hat:.3f}"
    return (
        f"R-hat {r_hat}"
        + ("" if judged.ess_bulk is None else f", ESS {judged.ess_bulk:.0f} bulk")
        + ("" if judged.ess_tail is None else f", {judged.ess_tail:.0f} tail")
    )
