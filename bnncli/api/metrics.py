"""The scores of a run that evaluate has stored."""

from __future__ import annotations

from typing import Any

from bnncli.artifacts.files import read_metrics
from bnncli.errors import BnnError, DataError, MissingInput
from bnncli.run.session import Run


def metrics_of(run: Run, *, posterior: str | None, split: str | None) -> list[dict[str, Any]]:
    """Rows of the run's metrics files, those of the posterior and the split that are named.

    Raises:
        MissingInput: there are none such.
        DataError: all that there are cannot be used; where a posterior was named, the first that cannot be.
    """
    files = run.folder.metrics_files()
    if not files:
        raise MissingInput(f"{run.checkpoint_path} has no metrics", hint=run.suggest("evaluate"))
    rows: list[dict[str, Any]] = []
    there: set[str] = set()
    unusable: list[BnnError] = []
    for path in files:
        names = {path.stem, path.stem.partition(".")[0]}  # also where it cannot be read
        try:
            header = read_metrics(path)
            names |= {str(row.get("posterior")) for row in header.meta["rows"]}
            if posterior is None or posterior in names:
                run.use(header)
                rows += header.meta["rows"]
        except (DataError, MissingInput) as error:
            if posterior in names:
                raise
            unusable.append(error)
            if posterior is None:
                run.console.warn(f"skipping {path.stem}: {error.message}{error.advice}")
        there |= names
    if posterior is not None and posterior not in there:
        known = ", ".join(sorted(there))
        raise MissingInput(f"no metrics for posterior {posterior!r} (have: {known})", hint=run.suggest("evaluate"))
    if not rows:
        first = unusable[0]
        if any(error.code != "stale_input" for error in unusable):
            raise first
        raise DataError("all metrics files of the run are stale", code="stale_input", hint=first.hint, path=first.path)
    kept = [row for row in rows if split in (None, row.get("split"))]
    if not kept:
        known = ", ".join(sorted({str(row.get("split")) for row in rows}))
        raise MissingInput(f"no metrics for split {split!r} (have: {known})", hint=run.suggest("evaluate"))
    return kept
