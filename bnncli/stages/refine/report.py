"""What refine says of what was achieved, and what to do about it."""

from __future__ import annotations

from typing import Any

from bnncli.evaluation.gain import NEGLIGIBLE_NATS, reach
from bnncli.evaluation.verdict import CLOSE_LOG_WEIGHT_SD
from bnncli.names import percent
from bnncli.session.posteriors import prior_line
from bnncli.session.val_report import PLAINER, val_lines, worse_than

FAR_LOG_WEIGHT_SD = 5.0
NEARLY_ALL = 0.95  # of the prior's variance: what is left where the data say next to nothing


def summary(metrics: dict[str, Any], *, has_draws: bool = False) -> list[str]:
    """The result for people, and what to do about it.

    Args:
        has_draws: whether the run has draws of the target by hmc, up to date.
    """
    advice = _advice(metrics, "the run's hmc draws" if has_draws else "hmc")
    before, after, gain = (metrics[name] for name in ("elbo_before", "elbo_after", "elbo_gain"))
    lines = [
        *prior_line(metrics),
        f"ELBO before {before['value']:.2f} +- {before['standard_error']:.2f}, after {after['value']:.2f} +- {after['standard_error']:.2f} nats; "
        f"gain {gain['value']:+.2f} +- {gain['standard_error']:.2f} ({metrics['elbo_draws']} fresh draws, full data)",
    ]
    if metrics["ended_early"]:
        lines.append(
            f"stopped after {metrics['epochs_run']} of {metrics['epochs']} epochs because the ELBO no longer improved"
        )
    if "subspace" in metrics:
        lines += _subspace(metrics["subspace"])
    lines += val_lines(metrics)
    spread = metrics["log_weight_sd_before"]
    if metrics["verdict"] == "helped":
        lines += _helped(metrics, advice)
    elif metrics["verdict"] == "hurt":
        lines.append(
            f"refinement made the posterior worse: use the base, or {advice}; or use a smaller --learning-rate with "
            "--patience 0"
        )
    elif metrics["verdict"] == "undecided":
        lines.append(_undecided(metrics, advice))
    elif spread < CLOSE_LOG_WEIGHT_SD:
        lines.append(
            "refinement made no difference that matters: the base already matches the target closely (standard "
            f"deviation of its log importance weights {spread:.2f})"
        )
    else:
        lines.append(
            "refinement made no difference that matters, but the base is still far from the target (standard "
            f"deviation of its log importance weights {spread:.2f}): {advice}"
        )
    return lines


def _subspace(inside: dict[str, Any]) -> list[str]:
    """In how many directions the flow acts, and what the data say of them."""
    least, most = inside["share_of_prior"]
    lines = [
        f"the flow acts in {inside['dimensions']} directions, where the base has {percent(least, '.3g')} to "
        f"{percent(most, '.3g')} of the prior's variance"
    ]
    if least > NEARLY_ALL:
        lines.append("the data say almost nothing about these directions: use a larger --subspace")
    return lines


def _helped(metrics: dict[str, Any], advice: str) -> list[str]:
    """That it is closer to the target; no help where that predicts val worse than what is simpler."""
    gain, spread = metrics["elbo_gain"]["value"], metrics["log_weight_sd_after"]
    is_far = spread > FAR_LOG_WEIGHT_SD
    small = f", but by less than {NEGLIGIBLE_NATS} nats" if gain < NEGLIGIBLE_NATS else ""
    worse = " and ".join(PLAINER.get(name, name) for name in worse_than(metrics))
    line = f"the refined posterior is closer to the target than the base{small}"
    if not worse:
        lines = [f"refinement helped: {line}"]
    else:
        line += f", but predicts val worse than {worse}"
        cause = "" if is_far else ": the model and its prior cause this, not the approximation"
        lines = [f"{line}{cause}{_other_prior(metrics)}"]
    if is_far:
        lines.append(
            f"it is still far from the target (standard deviation of its log importance weights {spread:.1f}): {advice}"
        )
    return lines


def _other_prior(metrics: dict[str, Any]) -> str:
    """What to try where a network's prior was chosen for the predictions of a Gaussian, which is linearised."""
    if "over_layers" not in metrics:
        return ""
    return (
        "; try the --prior-precision that the network was trained with (weight decay times examples), or --flow radial"
    )


def _undecided(metrics: dict[str, Any], advice: str) -> str:
    """Where the gain may lie, which the draws do not tell."""
    gain, draws = metrics["elbo_gain"], metrics["elbo_draws"]
    margin = reach(draws) * gain["standard_error"]
    ends = f"{gain['value'] - margin:+.2f} and {gain['value'] + margin:+.2f}"
    more = f"{advice}; or use more --elbo-draws"
    return (
        f"undecided after {draws} draws: the gain is between {ends} nats, so refinement may have helped, hurt or "
        f"had no effect: {more}"
    )


def _advice(metrics: dict[str, Any], draws: str) -> str:
    """What most likely comes closer, from what each flow reached on diagonal bases and on weak priors; or draws, in words."""
    if "subspace" in metrics:
        return "try a larger --subspace or none"
    if metrics["flow"] != "affine":
        return f"try --flow affine, or {draws}"
    if "over_layers" in metrics:
        wider = "--scale low-rank" if metrics["settings"]["scale"] == "diag" else "a larger --rank"
        return f"try {wider}, a base of another structure, or {draws}"
    if metrics["settings"]["scale"] != "block":
        return f"try --scale block, a longer --length, or {draws}"
    return f"try more --epochs, or {draws}"
