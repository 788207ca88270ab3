"""What is said of a rule, made now or before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.decisions import OOD, RISK, SETS
from bnncli.names import percent


def said(kind: str, settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """One line: what is guaranteed, and what it took."""
    certainty = settings.get("confidence")
    often = (
        "on average over calibration splits"
        if certainty is None
        else f"in {percent(certainty, 'g')} of calibration splits"
    )
    count = metrics["num_examples"]
    if kind == SETS:
        whose = "of each class's examples" if settings["class_conditional"] else "of examples"
        thresholds = metrics["thresholds"]
        shown = (
            f"threshold {thresholds[0]:.4g}"
            if len(thresholds) == 1
            else f"thresholds {min(thresholds):.4g} to {max(thresholds):.4g}"
        )
        raps = (
            f"; penalty {metrics['penalty']:g} beyond rank {metrics['free_ranks']}"
            if settings["sets"] == "raps"
            else ""
        )
        return (
            f"{settings['sets']} sets contain the class of at least {percent(settings['coverage'], 'g')} {whose}, "
            f"{often} ({shown}{raps}; {count} examples)"
        )
    if kind == RISK:
        if metrics["most_doubt"] is None:
            return (
                f"no threshold keeps wrong predictions to at most {percent(settings['risk'], 'g')} ({count} examples)"
            )
        if metrics["threshold"] == 0:
            return (
                f"accept every prediction: at most {percent(settings['risk'], 'g')} are wrong, {often}; here "
                f"{metrics['num_wrong']} of {count}"
            )
        wrong = percent(metrics["num_wrong"] / metrics["num_accepted"]) if metrics["num_accepted"] else "none"
        return (
            f"accept predictions with a confidence of at least {metrics['threshold']:.6g}: at most "
            f"{percent(settings['risk'], 'g')} are wrong, {often}; here {metrics['num_accepted']} of {count} are "
            f"accepted and {metrics['num_wrong']} of those are wrong ({wrong})"
        )
    if kind == OOD:
        return (
            f"an example is out-of-distribution if its {settings['score']} score is below "
            f"{metrics['threshold']:.6g} (higher is more in-distribution): at most "
            f"{percent(settings['false_alarm'], 'g')} false alarms, {often} ({count} examples)"
        )
    return (
        f"a batch has shifted if p is at most {settings['shift_level']:g}: two-sample Kolmogorov-Smirnov test on "
        f"{settings['score']} against {count} examples"
    )
