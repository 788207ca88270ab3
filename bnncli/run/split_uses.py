"""What a split has been used for: what was fitted to it, tuned on it or chosen by it must not be calibrated on it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError
from bnncli.run.prediction_groups import PredictionGroup
from bnncli.run.session import Run
from bnncli.run.shared_rows import shared_rows

_FEATURES = "features"
_FRESH = "calib"  # what a split that chooses nothing is called, where nothing else is said
_ALWAYS = ("train",)  # the network was trained on it, whatever else was


def require_unused(run: Run, group: PredictionGroup, header: Header) -> None:
    """Pass where a split, whose predictions these are, has chosen nothing of what made them.

    Raises:
        DataError: it has, with what, and the command that makes a split that has not.
    """
    split = str(header.meta["split"])
    uses = dict(_uses(run, group, header))
    why = f"the network was trained on it (as {split!r})" if split in _ALWAYS else uses.get(split)
    if why is None:
        known = [name for name in dict.fromkeys([*_ALWAYS, *uses]) if name in run.folder.splits()]
        shared = [text for name in known for text in shared_rows(run.folder, (name, split))]
        why = shared[0].partition(":")[0] if shared else None
    if why is None:
        return
    message = f"split {split!r} cannot calibrate {group.name}: {why}, so results on it look better than they are"
    raise DataError(message, code="split_was_used", hint=fresh_split(run, split), path=header.path)


def _uses(run: Run, group: PredictionGroup, header: Header) -> Iterator[tuple[str, str]]:
    """Every split that predictions go back to, but as their own inputs, and why."""
    own = f"{_FEATURES}.{header.meta['split']}"
    yield from _followed(header, {own, "classes"}, set())
    path = run.folder.recommended
    if not path.is_file():
        return
    try:
        found = read_metrics(path)
        chosen = next(row for row in found.meta["rows"] if row["is_recommended"])
        is_this = (chosen["posterior"], chosen["integrator"]) == (group.posterior, group.integrator)
    except (DataError, StopIteration, KeyError, TypeError):
        return
    if is_this:
        for entry in found.inputs:
            role, _, name = entry["role"].partition(".")
            if role == _FEATURES:
                yield name, f"auto used it to recommend {group.name}"


def _followed(header: Header, skipped: set[str], seen: set[Path]) -> Iterator[tuple[str, str]]:
    """The splits among the inputs of an artifact, and of what these were made from."""
    for entry in header.inputs:
        if entry["role"] in skipped or not entry.get("is_artifact", True):
            continue
        role, _, name = entry["role"].partition(".")
        if role == _FEATURES:
            yield name, f"{_titled(header)} was fitted or chosen with this split"
            continue
        path = header.input_path(entry)
        if path.resolve() not in seen and path.is_file():
            seen.add(path.resolve())
            yield from _followed(read_header(path), set(), seen)


def _titled(header: Header) -> str:
    if header.kind == "predictions":
        return f"its integrator {header.meta['integrator']}"
    return f"the {header.kind} {header.path.stem!r}"


def fresh_split(run: Run, split: str) -> str:
    """The command that makes a split that chose nothing: that of the run's test split, holding a part of it out."""
    there = run.folder.splits()
    if _FRESH in there and split != _FRESH:
        return f"calibrate on split {_FRESH} (\0split\0 {_FRESH})"
    name = _FRESH if split in there and _FRESH not in there else split if split not in there else f"{split}2"
    path = run.folder.features("test")
    if path.is_file():
        header = read_header(path)
        line = run.made_by(header)
        if line is not None and line.command == "extract-features" and split != "test":
            count = max(1, min(2000, int(header.meta.get("num_examples", 0)) // 2))
            held = [value for option, value in line.parts if option == "hold_out"]
            asked = [*held, f"{name}=test:{count}"]
            return f"{line.having('hold_out', asked).having('force', True).pasted()}, and predict again"
    return (
        f"extract again with a split that is not used to choose anything, such as \0hold_out\0 {name}=test:2000, "
        "with \0force\0, then predict"
    )
