"""What a run has already: posteriors and predictions that are up to date, so that no advice is to make them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnncli.artifacts.headers import Header
from bnncli.run.artifact_states import artifact_states
from bnncli.run.session import Run


def fresh_posterior(run: Run, name: str, params: Mapping[str, Any]) -> Header | None:
    """Return the header of the run's posterior of this name where it is up to date and has these parameters."""
    path = next((path for path in run.folder.posteriors() if path.stem == name), None)
    header = None if path is None else _fresh(run, [path])[0]
    if header is None or not params.items() <= header.provenance["params"].items():
        return None
    return header


def fresh_predictions(run: Run, name: str) -> Path | None:
    """Return the folder of these predictions (`<posterior>.<integrator>`) where they are up to date for every split but train."""
    paths = [run.folder.predictions(name, split) for split in run.folder.splits() if split != "train"]
    is_there = bool(paths) and all(path.is_file() for path in paths)
    return paths[0].parent if is_there and None not in _fresh(run, paths) else None


def _fresh(run: Run, paths: list[Path]) -> list[Header | None]:
    """The headers of artifacts; None for those that are not up to date."""
    return [one.header if one.state == "fresh" else None for one in artifact_states(run, paths)]


def to_predict(run: Run, posterior: str, integrator: str, *, is_default: bool) -> str:
    """Return what to do for the predictions of a posterior: run the command, or use those that are up to date.

    Args:
        is_default: whether predict takes the integrator of itself.
    """
    folder = fresh_predictions(run, f"{posterior}.{integrator}")
    if folder is not None:
        return f"use the predictions in {folder}"
    return f"run {run.suggest('predict', posterior=posterior, integrator=None if is_default else integrator)}"


def after_predictions(run: Run, name: str) -> str | None:
    """Return the command that goes on from predictions (`<posterior>.<integrator>`); None where they are not up to date."""
    if fresh_predictions(run, name) is None:
        return None
    metrics = run.folder.metrics(name)
    return run.suggest("compare" if metrics.is_file() and _fresh(run, [metrics])[0] is not None else "evaluate")
