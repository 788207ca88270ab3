"""What hmc says of its draws: numbers, lines for people, warnings, and the verdict of --until and --max-rhat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bnncli.errors import CheckFailed
from bnncli.evaluation.bfmi import LOW_BFMI, lowest_bfmi
from bnncli.evaluation.convergence import GOOD_RHAT, STUCK_ACCEPTANCE, Convergence, deciding
from bnncli.names import counted, percent
from bnncli.options.hmc import HmcOptions
from bnncli.options.shared import unmet
from bnncli.parameters.prior import Prior
from bnncli.session.chains import deciding_line, other_lines, parameter_metrics, prediction_metrics
from bnncli.session.posteriors import prior_line
from bnncli.session.val_report import val_lines

if TYPE_CHECKING:
    from bnncli.inference.hmc import HmcRun


def hmc_metrics(
    drawn: HmcRun,
    judged: Convergence,
    *,
    predictions: Mapping[str, Convergence],
    judged_by: str | None,
    options: HmcOptions,
    prior: Prior,
) -> dict[str, Any]:
    """The numbers of a run, as its artifact and `--json` give them.

    Args:
        judged: of the parameters.
        predictions: of log probabilities of labels: heldout, train.
        judged_by: whose numbers decide, heldout or train; None for the parameters'.
    """
    from bnncli.inference.hmc import goals

    num_draws = drawn.draws.shape[1]
    decided = judged if judged_by is None else predictions[judged_by]
    is_met = bool(options.conditions) and not unmet(options.conditions, condition_values(decided))
    return {
        "sampler": options.sampler,
        "dynamics": options.dynamics if options.sampler == "hmc" else None,
        **({} if options.gradients == "float32" else {"gradients": options.gradients}),
        "chains": options.chains,
        "draws": num_draws,
        **prior.to_meta(),
        **parameter_metrics(judged),
        # What chose the stop is no longer an estimate of what runs of this length have.
        "stopped_by": options.until if is_met else None,
        "until_looks": sum(goal <= num_draws for goal in goals(options.draws, options.max_draws))
        if options.conditions
        else None,
        **prediction_metrics(predictions, judged_by),
        "min_bfmi": None if drawn.energy is None else lowest_bfmi(drawn.energy.cpu().numpy()),
        "acceptance_rate": float(drawn.acceptance_rate.double().mean()),
        "lowest_chain_acceptance": float(drawn.acceptance_rate.double().mean(dim=1).min()),
        "divergences": int(drawn.diverging.sum()),
        "step_size": drawn.step_size,
        "mean_steps": float(drawn.n_steps.double().mean()),
    }


def summary(metrics: dict[str, Any]) -> list[str]:
    """The numbers as lines for people."""
    lines = [*prior_line(metrics), deciding_line(metrics)]
    if metrics.get("stopped_by") is not None:
        lines.append(
            f"these numbers decided when to stop (--until {metrics['stopped_by']}, after "
            f"{counted(metrics['until_looks'], 'check')}), so they are optimistic: a run of fixed length tends "
            "to have a larger R-hat and fewer effective draws"
        )
    lines += other_lines(metrics)
    if "judged_by" in metrics:
        lines.append("all chains started near the same weights, so R-hat cannot detect modes that none of them reached")
    bfmi = "" if metrics["min_bfmi"] is None else f", lowest E-BFMI {metrics['min_bfmi']:.2f}"
    coarse = f" with {metrics['gradients']} gradients and exact energies" if "gradients" in metrics else ""
    lines.append(
        f"acceptance {metrics['acceptance_rate']:.2f}{coarse}, {counted(metrics['divergences'], 'divergence')}, "
        f"step size {metrics['step_size']:.3f}, {metrics['mean_steps']:.1f} steps per draw{bfmi}"
    )
    lines += val_lines(metrics)
    return lines


def hmc_warnings(metrics: dict[str, Any]) -> list[str]:
    """Why these draws may not be the posterior's; empty when nothing speaks against them."""
    found = []
    r_hat = deciding(metrics).r_hat
    if r_hat is not None and r_hat > GOOD_RHAT:
        of = " of predictions" if "judged_by" in metrics else ""
        found.append(f"the chains do not agree: largest R-hat{of} {r_hat:.3f} (above {GOOD_RHAT}); {_remedy(metrics)}")
    if metrics["lowest_chain_acceptance"] < STUCK_ACCEPTANCE:
        lowest = metrics["lowest_chain_acceptance"]
        found.append(f"a chain is stuck: it accepts {percent(lowest)} of its moves; {_remedy(metrics)}")
    if metrics["divergences"]:
        diverged = "1 trajectory" if metrics["divergences"] == 1 else f"{metrics['divergences']} trajectories"
        found.append(f"{diverged} diverged; try a higher --target-accept")
    if metrics["min_bfmi"] is not None and metrics["min_bfmi"] < LOW_BFMI:
        found.append(
            f"energies change too slowly: lowest E-BFMI {metrics['min_bfmi']:.2f} (below {LOW_BFMI}); the tails "
            "may be missing, so use more --draws or a larger --prior-precision"
        )
    return found


def verdict(metrics: dict[str, Any], options: HmcOptions) -> CheckFailed | None:
    """The failure that --until or --max-rhat asks for; an undefined value passes neither."""
    decided = deciding(metrics)
    values = condition_values(decided)
    missed = unmet(options.conditions, values)
    if missed:
        got = ", ".join(f"{condition.name} is {_shown(values[condition.name])}" for condition in missed)
        return CheckFailed(
            f"--until {options.until}: {got} after {metrics['draws']} draws per chain",
            hint="draw again with a larger --max-draws and --force (or another --name)",
            code="until",
        )
    if options.max_rhat is None or (decided.r_hat is not None and decided.r_hat <= options.max_rhat):
        return None
    of = " of predictions" if "judged_by" in metrics else ""
    return CheckFailed(
        f"--max-rhat {options.max_rhat}: the largest R-hat{of} is {_shown(decided.r_hat)}",
        hint=_remedy(metrics),
        code="max_rhat",
    )


def condition_values(numbers: Convergence) -> dict[str, float | None]:
    """What the conditions of --until are about, by the names they have there."""
    return {"rhat": numbers.r_hat, "ess": numbers.ess_bulk, "ess-tail": numbers.ess_tail}


def _shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}" if value < 10 else f"{value:.0f}"


def _remedy(metrics: dict[str, Any]) -> str:
    """What most likely helps."""
    if metrics["chains"] == 1:
        return "use more --chains"
    if metrics["lowest_chain_acceptance"] < STUCK_ACCEPTANCE:
        return "use a higher --target-accept and more --warmup"
    return "use more --warmup and --draws"
