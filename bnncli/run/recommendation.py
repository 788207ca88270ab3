"""What `auto` recommends of a run: written by it, taken by predict where nothing else is named."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import DataError, MissingInput
from bnncli.run.revisions import AUTO
from bnncli.run.session import Run
from bnncli.storage.metrics import read_metrics


@dataclass(frozen=True)
class Recommended:
    """A posterior and the integrator to predict with, and why, as auto has said it."""

    posterior: str
    integrator: str
    sentence: str = ""


def judged_before(run: Run) -> dict[str, bool]:
    """Of posteriors, by their content's digest, whether the last recommendation found them good for their target.

    Empty where it was made by other seeds or another version, or is damaged.
    """
    path = run.folder.recommended
    try:
        header = read_metrics(path)
        made_alike = header.provenance["algo_rev"] == AUTO and header.provenance["params"]["seed"] == run.compute.seed
        judged = dict(header.meta["rows"][-1]["judged"]) if made_alike else {}
        return {str(digest): bool(is_good) for digest, is_good in judged.items()}
    except (DataError, MissingInput, KeyError, IndexError, TypeError, ValueError):
        return {}


def recommended(run: Run) -> Recommended | None:
    """The run's recommendation; None without one. Raises DataError for one that is stale or damaged."""
    path = run.folder.recommended
    if not path.is_file():
        return None
    try:
        header = read_metrics(path)
        run.use(header)
        row = next(row for row in header.meta["rows"] if row["is_recommended"])
        return Recommended(
            str(row["posterior"]), str(row["integrator"]), str(header.meta["rows"][-1].get("sentence", ""))
        )
    except (DataError, KeyError, StopIteration, TypeError) as error:
        why = error.message if isinstance(error, DataError) else "it recommends nothing"
        raise DataError(
            f"the recommendation of auto cannot be used: {why}", code="stale_input", path=path,
            hint=f"run {run.suggest('auto')} again, or name a posterior: \0posterior\0 NAME",
        ) from None  # fmt: skip
