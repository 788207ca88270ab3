"""What is said of an export: what goes in and comes out, how near it is to predict, what it loses, how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.names import percent
from bnncli.system.memory import bytes_text

SIZES = (1, 32, 1024)  # of batches that are timed


def summary(meta: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    """Lines for people."""
    parity = metrics["parity"]
    goes_in = ", ".join(
        f"{one['name']} ({', '.join(map(str, one['shape']))}) {one['type']}"
        for one in meta.get("inputs") or [meta["input"]]
    )
    lines = [
        f"{meta['posterior']} ({meta['variant']}), {bytes_text(metrics['bytes'])}: {goes_in} -> "
        + ", ".join(output["name"] for output in meta["outputs"]),
        f"probabilities on {parity['split']} ({parity['rows']} rows) match predict to within "
        f"{_each(parity['max_difference'])}",
    ]
    draws, is_shared = metrics["draws"], meta["variant"].startswith("logit-mc")
    if draws is not None and (is_shared or draws["stored"] < draws["predict"]):
        shared = ", shared by all inputs" if is_shared else ""
        lines.append(f"draws: {draws['stored']} of predict's {draws['predict']}{shared}{_loss(metrics)}")
    if "sets" in metrics:
        sets = metrics["sets"]
        lines.append(
            f"sets of rule {_of_kind(meta, 'sets')}: {percent(sets['same'])} match predict; mean size "
            f"{sets['size']:.2f} ({sets['size_of_predict']:.2f} in predict)"
        )
    for name, rule in meta["decisions"].items():
        if rule["kind"] == "ood":
            lines.append(
                f"{name}: ood_score above {rule['outlier_above']:.6g} marks an outlier, with "
                f"{percent(rule['false_alarm'])} false alarms"
            )
        if rule["kind"] == "risk":
            least = rule["accept_largest_from"]
            said = (
                "accepts nothing"
                if least is None
                else f"accepts predictions with a largest probability of at least {least:.6g}"
            )
            lines.append(f"{name}: {said}, with a risk of {percent(rule['risk'])}")
    if metrics["milliseconds"] is not None:
        sizes = " / ".join(f"{size:,}" for size in SIZES)
        each = "; ".join(f"{name} {_times(times)}" for name, times in metrics["milliseconds"].items())
        lines.append(f"time for {sizes} inputs: {each}")
    return lines


def _of_kind(meta: Mapping[str, Any], kind: str) -> str:
    """The name of the rule of a kind."""
    return next(name for name, rule in meta["decisions"].items() if rule["kind"] == kind)


def _each(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.1e} ({name})" for name, value in values.items())


def _loss(metrics: Mapping[str, Any]) -> str:
    """What fewer draws lose, where there are labels."""
    nll = metrics["nll"]
    return "" if nll is None else f"; NLL {nll['export']:.4f}, {nll['predict']:.4f} with all ({nll['loss']:+.4f})"


def _times(times: Mapping[str, float | None]) -> str:
    return " / ".join(_time(times[str(size)]) for size in SIZES)


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.2g} ms"
