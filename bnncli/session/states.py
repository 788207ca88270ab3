"""Find the state of every artifact of a run, its dependencies, and which are up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import write_error
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import Followed, note_path, refresh_command, staleness
from bnncli.artifacts.headers import Header
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import NOT_OF_CONTENT, BnnError, DataError, MissingInput
from bnncli.session.revisions import is_another
from bnncli.session.run import Run

STALE = "stale"


@dataclass(frozen=True)
class ArtifactState:
    """An artifact and whether it is up to date.

    Attributes:
        state: fresh, stale, invalid (damaged), or unknown (a file needed to decide cannot be read).
        header: None for an invalid artifact.
        remake: the command that recreates it; None if unknown.
    """

    path: Path
    state: str
    why: str = ""
    header: Header | None = None
    remake: str | None = None


def artifact_files(run: Run) -> list[Path]:
    """Return every artifact of the run, inputs before outputs, except for posteriors of posteriors.

    Raises:
        MissingInput: there is no run folder.
    """
    folder = run.folder
    if not folder.root.is_dir():
        raise run.no_run()
    return (
        [folder.features(name) for name in folder.splits()]
        + folder.posteriors()
        + folder.prediction_files()
        + folder.decision_files()
        + folder.monitor_files()
        + folder.metrics_files()
        + folder.export_files()
        + [path for path in (folder.recommended,) if path.is_file()]
    )


def artifact_states(run: Run, paths: Iterable[Path]) -> list[ArtifactState]:
    """Return the state of each artifact."""
    followed: Followed = {}
    return [_state(run, path, followed) for path in paths]


def _state(run: Run, path: Path, followed: Followed) -> ArtifactState:
    run.console.poll(f"state of {path.name}")
    header: Header | None = None
    remake: str | None = None
    try:
        header = read_header(path)
        remake = run.remake(header)
        record = run.belongs(header)
        weights_digest = record["weights_digest"] if record else None
        stale = staleness(header, is_another=is_another, weights_digest=weights_digest, followed=followed)
    except NOT_OF_CONTENT:
        raise
    except MissingInput as error:
        return ArtifactState(path, "unknown", error.message, header, remake)
    except BnnError as error:
        if error.code == "wrong_checkpoint":
            return ArtifactState(path, STALE, "the checkpoint has changed", header, remake)
        return ArtifactState(path, "invalid", error.message, header, remake)
    if stale is None:
        return ArtifactState(path, "fresh", "", header, remake)
    return ArtifactState(path, STALE, stale.why, header, refresh_command(header, stale, run.remake))


def dependents(run: Run, files: Sequence[Path], named: Iterable[Path]) -> list[Path]:
    """Return the files created from the named ones, directly or indirectly, without the named ones.

    Damaged files are skipped because their inputs are unknown.
    """
    inputs: dict[Path, set[Path]] = {}
    for path in files:
        run.console.poll(f"inputs of {path.name}")
        with contextlib.suppress(DataError):
            header = read_header(path)
            inputs[path] = {header.input_path(one).resolve() for one in header.inputs if one.get("is_artifact", True)}
    gone = {path.resolve() for path in named}
    own, found = set(gone), set[Path]()
    while new := {path for path, of in inputs.items() if path not in found and path.resolve() not in own and of & gone}:
        found |= new
        gone |= {path.resolve() for path in new}
    return [path for path in files if path in found]


def removal_order(run: Run, paths: Iterable[Path]) -> list[Path]:
    """Sort files so that dependents come first: an interrupted removal leaves no file without its inputs."""
    left, ordered = list(dict.fromkeys(paths)), list[Path]()
    needs = {path: set(dependents(run, left, [path])) for path in left}
    while left:
        free = [path for path in left if not needs[path] & {*left}] or left[-1:]  # or a cycle
        ordered += free
        left = [path for path in left if path not in free]
    return ordered


def remove_artifacts(run: Run, paths: Iterable[Path]) -> None:
    """Remove artifacts, the files next to them, and prediction folders that become empty.

    Raises:
        Locked: another process is writing one of them; nothing is removed.
        OutputExists, WriteError: a file cannot be removed, or is behind a linked folder.
    """
    ordered = removal_order(run, paths)
    with contextlib.ExitStack() as locks:
        for path in sorted(ordered):
            locks.enter_context(artifact_lock(run.folder.lock(path), wait=run.lock.wait, poll=run.console.poll))
        for path in ordered:
            run.console.poll("removing")
            is_export = path.parent.name == "exports"
            for file in (*([path.with_suffix(".py")] if is_export else []), note_path(path), path):
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:
                    raise write_error(error, file) from None
            if path.parent.parent.name in ("predictions", "decisions"):
                with contextlib.suppress(OSError):  # folder not empty
                    path.parent.rmdir()


def fresh_posterior(run: Run, name: str, params: Mapping[str, Any]) -> Header | None:
    """Return the header of the run's posterior of this name if it is up to date and has these parameters, else None."""
    path = next((path for path in run.folder.posteriors() if path.stem == name), None)
    header = None if path is None else _fresh(run, [path])[0]
    if header is None or not params.items() <= header.provenance["params"].items():
        return None
    return header


def fresh_predictions(run: Run, name: str) -> Path | None:
    """Return the folder of `<posterior>.<integrator>` if it is up to date for every split except train, else None."""
    paths = [run.folder.predictions(name, split) for split in run.folder.splits() if split != "train"]
    is_there = bool(paths) and all(path.is_file() for path in paths)
    return paths[0].parent if is_there and None not in _fresh(run, paths) else None


def _fresh(run: Run, paths: list[Path]) -> list[Header | None]:
    """Return the headers of artifacts; None for those that are not up to date."""
    return [one.header if one.state == "fresh" else None for one in artifact_states(run, paths)]


def advise_predict(run: Run, posterior: str, integrator: str, *, is_default: bool) -> str:
    """Return advice to run predict for a posterior, or to use its predictions if they are up to date.

    Args:
        is_default: whether predict chooses this integrator by default.
    """
    folder = fresh_predictions(run, f"{posterior}.{integrator}")
    if folder is not None:
        return f"use the predictions in {folder}"
    return f"run {run.suggest('predict', posterior=posterior, integrator=None if is_default else integrator)}"


def suggest_next_command(run: Run, name: str) -> str | None:
    """Return the next command after predictions (`<posterior>.<integrator>`); None if they are not up to date."""
    if fresh_predictions(run, name) is None:
        return None
    metrics = run.folder.metrics(name)
    return run.suggest("compare" if metrics.is_file() and _fresh(run, [metrics])[0] is not None else "evaluate")
