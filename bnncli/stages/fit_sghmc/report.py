"""What fit-sghmc says of its draws: how the chains agree, what biases them, what they are worth on val."""

from __future__ import annotations

from typing import Any

from bnncli.evaluation.convergence import GOOD_RHAT, deciding
from bnncli.names import percent
from bnncli.session.chains import deciding_line, other_lines
from bnncli.session.posteriors import LEAVE_OUT
from bnncli.session.val_report import val_lines

LARGE = 0.5  # a share by which the variance is too large that is worth a warning


def summary(metrics: dict[str, Any]) -> list[str]:
    """The numbers as lines for people."""
    lines = [deciding_line(metrics), *other_lines(metrics)]
    starts = "the same weights" if metrics["start"] == "checkpoint" else "separate initialisations"
    lines.append(
        f"all chains started at {starts} and saw the same minibatches, so R-hat cannot detect an error that they share"
    )
    how = "as given" if metrics["learning_rate_by"] == "given" else "from the stiffness"
    cold = (
        "" if metrics["temperature"] == 1 else f"; temperature {metrics['temperature']:g} instead of the posterior's 1"
    )
    lines.append(
        f"learning rate {metrics['learning_rate']:.3g} ({how}), momentum decay {metrics['momentum_decay']:g}, batches of "
        f"{metrics['batch_size']:,}{cold}"
    )
    lines.append(
        f"steps are never rejected: along the stiffest direction (curvature {metrics['stiffness']:.3g}), the "
        f"step length makes the variance {_share(metrics['excess_by_steps'])} too large, and minibatch noise "
        f"makes it up to {_share(metrics['excess_by_batches'])} too large"
    )
    lines += val_lines(metrics)
    return lines


def warnings(metrics: dict[str, Any]) -> list[str]:
    """Why these draws may not be the posterior's; empty when nothing speaks against them."""
    found = []
    r_hat = deciding(metrics).r_hat
    if r_hat is not None and r_hat > GOOD_RHAT:
        of = " of predictions" if "judged_by" in metrics else ""
        found.append(f"the chains do not agree: largest R-hat{of} {r_hat:.3f} (above {GOOD_RHAT}); use more --epochs")
    steps, batches = metrics["excess_by_steps"], metrics["excess_by_batches"]
    if steps is None or steps > LARGE:
        found.append(f"steps are too long for the stiffest direction; {_shorter(metrics)}")
    if batches is not None and batches > LARGE:
        found.append(
            f"minibatch noise makes the variance along the stiffest direction up to {_share(batches)} too large: "
            "use a larger --batch-size or a smaller --learning-rate"
        )
    return found


def _shorter(metrics: dict[str, Any]) -> str:
    """How to have shorter steps."""
    if metrics["learning_rate_by"] == "given":
        return LEAVE_OUT
    return f"use a --learning-rate below {metrics['learning_rate']:.3g}"


def _share(value: float | None) -> str:
    return "an unbounded factor" if value is None else f"{value:.2g} times" if value >= 1 else percent(value, ".2g")
