"""What fit-swag says of its Gaussian: how it was made, how wide it is, what it is worth on val."""

from __future__ import annotations

from typing import Any

from bnncli.names import counted, percent
from bnncli.session.posteriors import LEAVE_OUT
from bnncli.session.val_report import val_lines

TOO_NARROW = 1e-6


def summary(metrics: dict[str, Any]) -> list[str]:
    """The numbers as lines for people."""
    how = {
        "given": "as given",
        "noise": "from the gradient noise",
        "stability": "half of the stable limit",
        "pilot": "halved until the steps were stable",
    }
    lines = [
        f"{counted(metrics['iterates'], 'iterate')} after {counted(metrics['warmup'], 'epoch')} of warm-up; learning rate {metrics['learning_rate']:.3g} "
        f"({how[metrics['learning_rate_by']]}), momentum {metrics['momentum']:g}, batches of {metrics['batch_size']:,}"
    ]
    scale = "" if metrics["scale"] == 1 else f", scale {metrics['scale']:g}"
    lines.append(
        f"the covariance is half diagonal, half of rank {metrics['rank']}{scale}; the median parameter has "
        f"{percent(metrics['median_share_of_prior'], '.3g')} of the prior's variance, the largest has "
        f"{percent(metrics['largest_share_of_prior'], '.3g')} (set by the learning rate)"
    )
    if metrics["median_share_of_base"] is not None:
        share = percent(metrics["median_share_of_base"], ".3g")
        lines.append(f"the median parameter has {share} of its variance in {metrics['base']}")
    lines.append(
        f"log joint {metrics['log_joint_start']:.2f} nats at the start, {metrics['log_joint_mean']:.2f} at the mean of the iterates"
    )
    lines += val_lines(metrics)
    return lines


def warnings(metrics: dict[str, Any]) -> list[str]:
    """Why this spread is no posterior's; empty when nothing speaks against it."""
    found, rate = [], f"{metrics['learning_rate']:.3g}"
    slower = LEAVE_OUT if metrics["learning_rate_by"] == "given" else f"use a --learning-rate below {rate}"
    if metrics["share_wider_than_prior"] > 0:
        found.append(
            f"{percent(metrics['share_wider_than_prior'], '.3g')} of the parameters have a larger variance than "
            f"under the prior, although data lower the variance on average: {slower}, or use a smaller --scale"
        )
    if metrics["median_share_of_prior"] < TOO_NARROW:
        found.append(
            f"the spread is negligible compared with the prior (median {metrics['median_share_of_prior']:.2g} of "
            f"its variance): use a --learning-rate above {rate}"
        )
    if metrics["num_still"]:
        had = "has" if metrics["num_still"] == 1 else "have"
        found.append(f"{counted(metrics['num_still'], 'parameter')} did not move and {had} almost no variance")
    return found
