"""What fit-lbbnn says of a fit, in lines for people."""

from __future__ import annotations

from typing import Any

from bnncli.evaluation.input_selection import THRESHOLD
from bnncli.names import percent

_NAMED = 20  # inputs in a line for people


def summary(metrics: dict[str, Any]) -> list[str]:
    """Lines for people."""
    if not metrics:
        return []
    bound, fit = metrics["bound"], metrics["expected_log_likelihood"]
    lines = [
        f"bound {bound['value']:.1f} +- {bound['standard_error']:.1f} nats: expected log likelihood {fit['value']:.1f}, "
        f"divergence {fit['value'] - bound['value']:.1f}"
    ]
    if metrics.get("log_likelihood_of_shares") is not None:
        lines[0] += f"; log likelihood of the class frequencies {metrics['log_likelihood_of_shares']:.1f}"
    if metrics.get("rise") is not None:
        lines.append(f"change of the bound over the last tenth of the epochs: {percent(metrics['rise'], '+.1f')}")
    layers = ", ".join(percent(share) for share in metrics["density_by_layer"])
    lines.append(
        f"density {percent(metrics['density'])} (by layer {layers}); {percent(metrics['median_density'])} in the "
        "median probability model"
    )
    if "inputs" in metrics:
        lines.append(_inputs_line(metrics["inputs"]))
    if metrics.get("slab_sd_search"):
        best = min(metrics["slab_sd_search"], key=lambda one: one["val_nll"])
        lines.append(
            f"slab standard deviation {best['slab_sd']:.3g}, chosen by val NLL ({best['val_nll']:.4f} in the search)"
        )
    if "seconds_per_epoch" in metrics:
        lines.append(f"{metrics['seconds_per_epoch']:.2f} s per epoch")
    return lines


def _inputs_line(inputs: list[dict[str, Any]]) -> str:
    """Which inputs are in by their mean inclusion, numbered from 1, the most probable first."""
    found = sorted((part for part in inputs if part["mean"] > THRESHOLD), key=lambda part: -part["mean"])
    named = [f"{part['input']} ({part['mean']:.2f})" for part in found[:_NAMED]]
    if len(found) > _NAMED:
        named.append(f"{len(found) - _NAMED} more")
    return f"included inputs, of {len(inputs)} (mean inclusion probability): {', '.join(named) or 'none'}"
