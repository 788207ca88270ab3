"""status: every artifact of a run, and whether it is still true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.errors import NOT_OF_CONTENT, BnnError, CheckFailed, MissingInput
from bnncli.options import StatusOptions
from bnncli.options.command import READ, Command
from bnncli.run.revisions import is_another
from bnncli.run.session import Result, Run, Table
from bnncli.storage import resume
from bnncli.storage.artifacts import read_header
from bnncli.storage.atomic import temporaries
from bnncli.storage.freshness import Followed, refresh_command, staleness

COMMAND = Command(
    "List the artifacts of a run: fresh, stale, missing or invalid.",
    "An artifact is stale when an input it was made from has changed since, by content.",
    (StatusOptions, *READ),
    ("bnncli status ckpt.pt", "bnncli status ckpt.pt --check || bnncli fit-laplace ckpt.pt"),
    place=130,
)


def run(run: Run, options: StatusOptions) -> Result:
    """The state of each artifact: fresh, stale, missing or invalid."""
    folder = run.folder
    if not folder.root.is_dir():
        raise MissingInput(
            f"{run.checkpoint_path} has no run folder (looked for {folder.root})",
            hint="bnncli extract-features --help",
            path=folder.root,
        )
    paths = (
        [folder.features(name) for name in folder.splits()]
        + folder.posteriors()
        + folder.prediction_files()
        + folder.decision_files()
        + folder.metrics_files()
        + folder.export_files()
        + [path for path in (folder.recommended,) if path.is_file()]
    )
    followed: Followed = {}
    entries = [_entry(run, path, followed) for path in paths]
    entries += [_missing(path) for path in _expected(run, paths)]
    leftovers = [str(path) for path in temporaries(folder.root)]
    notes = [f"leftover of a dead run: {path} (bnncli clean removes it)" for path in leftovers]
    states = [str(path) for path in resume.leftovers(folder.root)]
    notes += [f"resume state: {path} (--resume continues from it, bnncli clean removes it)" for path in states]
    notes += [f"to refresh: {entry['remake']}" for entry in entries if entry["state"] == "stale" and entry["remake"]]
    table = Table(
        ["artifact", "state", "why"],
        [[entry["name"], entry["state"], entry["why"]] for entry in entries],
        notes=list(dict.fromkeys(notes)),
    )
    result = Result(extra={"artifacts": entries, "leftovers": leftovers, "resume_states": states}, tables=[table])
    bad = [entry["name"] for entry in entries if entry["state"] != "fresh"]
    if options.check and bad:
        result.failure = CheckFailed(
            f"not fresh: {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}", code="not_fresh"
        )
    return result


def _entry(run: Run, path: Path, followed: Followed) -> dict[str, Any]:
    """One artifact's state."""
    entry: dict[str, Any] = {
        "name": str(path.relative_to(run.folder.root)),
        "path": str(path),
        "kind": None,
        "state": "fresh",
        "why": "",
        "content_digest": None,
        "remake": None,
    }
    run.console.poll(f"status of {entry['name']}")
    try:
        header = read_header(path)
    except NOT_OF_CONTENT:
        raise
    except BnnError as error:
        return entry | {"state": "invalid", "why": error.message}
    entry |= {"kind": header.kind, "content_digest": header.content_digest, "remake": run.remake(header)}
    try:
        record = run.belongs(header)
    except NOT_OF_CONTENT:
        raise
    except BnnError as error:
        changed = "the checkpoint has changed" if error.code == "wrong_checkpoint" else error.message
        return entry | {"state": "stale", "why": changed}
    weights_digest = record["weights_digest"] if record else None
    try:
        stale = staleness(header, is_another=is_another, weights_digest=weights_digest, followed=followed)
    except NOT_OF_CONTENT:
        raise
    except BnnError as error:
        return entry | {"state": "invalid", "why": error.message}
    if stale is None:
        return entry
    return entry | {"state": "stale", "why": stale.why, "remake": refresh_command(header, stale, run.remake)}


def _expected(run: Run, paths: list[Path]) -> list[Path]:
    """What every run has and this one lacks: the training features, or inputs that its artifacts name."""
    named = [run.folder.features("train")]
    for path in paths:
        run.console.poll(f"inputs of {path.name}")
        try:
            header = read_header(path)
        except NOT_OF_CONTENT:
            raise
        except BnnError:
            continue
        named += [header.input_path(entry) for entry in header.inputs if entry.get("is_artifact", True)]
    there = {path.resolve() for path in paths}
    missing = {path.resolve(): path for path in named if path.resolve() not in there and not path.exists()}
    return list(missing)


def _missing(path: Path) -> dict[str, Any]:
    return {
        "name": f"{path.parent.name}/{path.name}",
        "path": str(path),
        "kind": None,
        "state": "missing",
        "why": "",
        "content_digest": None,
        "remake": None,
    }
