"""status: list the run's artifacts and their state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.artifacts import resume
from bnncli.artifacts.atomic import dead_temporaries
from bnncli.artifacts.files import read_header
from bnncli.errors import NOT_OF_CONTENT, BnnError, CheckFailed
from bnncli.options.command import READ, Command
from bnncli.options.declaration import CheckedOptions, option
from bnncli.session.run import Result, Run, Table
from bnncli.session.states import STALE, ArtifactState, artifact_files, artifact_states


@dataclass(frozen=True)
class StatusOptions(CheckedOptions):
    """Options of status."""

    check: bool = option(False, "Exit 3 unless every artifact is up to date.")


COMMAND = Command(
    "List a run's artifacts and whether each is up to date.",
    "An artifact is stale if the content of an input has changed since it was created. Its state is unknown if "
    "an input cannot be read.",
    (StatusOptions, *READ),
    ("bnncli status ckpt.pt", "bnncli status ckpt.pt --check || bnncli fit-laplace ckpt.pt"),
    section="Files",
    place=10,
)


def execute(run: Run, options: StatusOptions) -> Result:
    """Report the state of each artifact."""
    folder = run.folder
    paths = artifact_files(run)
    entries = [_entry(run, one) for one in artifact_states(run, paths)]
    entries += [_missing(path) for path in _find_missing(run, paths)]
    leftovers = [str(path) for path in dead_temporaries(folder.root)]
    notes = [f"left over from a process that has ended: {path} (bnncli clean removes it)" for path in leftovers]
    states = [str(path) for path in resume.find_leftovers(folder.root)]
    notes += [f"resume state: {path} (--resume continues from it, bnncli clean removes it)" for path in states]
    notes += [f"to refresh: {entry['remake']}" for entry in entries if entry["state"] == STALE and entry["remake"]]
    table = Table(
        ["artifact", "state", "why"],
        [[entry["name"], entry["state"], entry["why"]] for entry in entries],
        notes=list(dict.fromkeys(notes)),
    )
    result = Result(extra={"artifacts": entries, "leftovers": leftovers, "resume_states": states}, tables=[table])
    bad = [entry["name"] for entry in entries if entry["state"] != "fresh"]
    if STALE in {entry["state"] for entry in entries}:
        table.notes.append(f"to remove stale artifacts: {run.suggest('clean', stale=True)}")
    if options.check and bad:
        result.failure = CheckFailed(
            f"not fresh: {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}", code="not_fresh"
        )
    return result


def _entry(run: Run, artifact: ArtifactState) -> dict[str, Any]:
    """Return the state of one artifact for --json."""
    header = artifact.header
    return {
        "name": str(artifact.path.relative_to(run.folder.root)),
        "path": str(artifact.path),
        "kind": None if header is None else header.kind,
        "state": artifact.state,
        "why": artifact.why,
        "content_digest": None if header is None else header.content_digest,
        "remake": artifact.remake,
    }


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


def _find_missing(run: Run, paths: list[Path]) -> list[Path]:
    """Return what the run should have and lacks: training features, or inputs that its artifacts name."""
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
