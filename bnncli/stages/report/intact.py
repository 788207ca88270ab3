"""What of a run a report can rely on: its checkpoint and features, without which there is none; what else is damaged is left out, and told."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from bnncli import registry
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import carries_our_mark
from bnncli.artifacts.headers import Header
from bnncli.errors import DAMAGED_HINT, NOT_OF_CONTENT, BnnError, DataError
from bnncli.figures.pages import Missing
from bnncli.names import printable
from bnncli.session.inputs import load_split, require_draws
from bnncli.session.predictions import maker_of
from bnncli.session.run import Run
from bnncli.stages.report.subject import Damaged, Subject, tried
from bnncli.stages.verify import check_artifact

_READ = ("train", "val")  # splits that posteriors are judged on; of the others the headers are enough


def check_run(run: Run) -> None:
    """Pass where the run is of the checkpoint that was named, with features that can be read: all else is made from them.

    Raises:
        MissingInput: the checkpoint is gone.
        DataError: the features are damaged, stale, or of another checkpoint; or the checkpoint cannot be read.
        Untrusted: the checkpoint is code.
    """
    names = run.folder.splits()
    for name in names:
        try:
            run.belongs(read_header(run.folder.features(name)))
            if name in _READ:
                load_split(run, name)
        except DataError as error:
            if error.hint in (None, DAMAGED_HINT):
                error.hint = _features_command(run, names)
            raise
    run.heads.clear()


def _features_command(run: Run, names: list[str]) -> str:
    """The command that makes the features anew, from the header of any split that has one: most come from one command."""
    headers = (tried(partial(read_header, run.folder.features(name))) for name in names)
    made = (run.remake(header, force=True) for header in headers if isinstance(header, Header))
    usual = run.suggest("extract-features", model="MODEL", data=["train=SPEC", "test=SPEC"], force=True)
    return next((command for command in made if command is not None), usual)


def damaged(run: Run, named: list[str]) -> list[Damaged]:
    """Posteriors, predictions, metrics and recommendation that cannot be read to the last byte, with a warning for each.

    Args:
        named: posteriors that were asked for by name.

    Raises:
        DataError: one of these is damaged.
    """
    folder = run.folder
    paths = [*folder.posteriors(), *folder.prediction_files(), *folder.metrics_files()]
    paths += [path for path in (folder.recommended,) if path.is_file()]
    found = []
    for path in paths:
        name = str(path.relative_to(folder.root))
        run.console.poll(f"check {name}")
        try:
            _check(run, path)
        except BnnError as error:
            if error.code == "out_of_memory":  # what would read it says so
                continue
            if isinstance(error, NOT_OF_CONTENT):
                raise
            command = _in_its_place(path, _command(run, path))
            if path.stem in named and path.parent.name == "posteriors":
                raise DataError(error.message, hint=command or error.hint, code=error.code, path=path) from None
            what = error.message.removeprefix(str(path)).lstrip(": ")
            run.console.warn(f"leaving out {name}: {what}" + (f"; run: {command}" if command else ""))
            found.append(Damaged(path, name, what, command))
    return found


def _check(run: Run, path: Path) -> None:
    """Pass where every byte of an artifact is as it was written."""
    header = read_header(path)
    if header.kind == "samples":
        require_draws(run, header)
    check_artifact(path)


def _command(run: Run, path: Path) -> str | None:
    """The command that makes a damaged artifact again, in its place: its own, or, where it does not say, the usual one of its name."""
    kind, name = path.parent.name, path.stem
    beside = sorted(path.parent.glob("[!.]*.h5"), key=lambda one: one != path) if path.suffix == ".h5" else [path]
    headers = (tried(partial(read_header, one)) for one in beside)  # the splits of predictions come from one command
    header = next((one for one in headers if isinstance(one, Header)), None)
    if header is not None:
        return run.remake(header, force=True)
    if path == run.folder.recommended:
        return run.suggest("auto", force=True)
    if kind == "metrics":
        return run.suggest("evaluate", force=True)
    if kind == "posteriors":
        maker = maker_of(run, name)
        return _features_command(run, run.folder.splits()) if name == "map" else maker and f"{maker} --force"
    posterior, _, variant = kind.partition(".")
    integrators = [one for one in registry.names("integrators") if f"{variant}-".startswith(f"{one}-")]
    if not integrators or posterior not in {one.stem for one in run.folder.posteriors()}:
        return None
    return run.suggest("predict", posterior=posterior, integrator=max(integrators, key=len), force=True)


def _in_its_place(path: Path, command: str | None) -> str | None:
    """The command; of a file that does not show any more that it is ours, which nothing replaces, once that is moved away."""
    if command is None or carries_our_mark(path):
        return command
    own, away = (shlex.quote(printable(name, keep_bytes=True)) for name in (str(path), f"{path}.damaged"))
    return f"mv {own} {away} && {command}"


def check_is_something_left(subject: Subject) -> None:
    """Pass unless artifacts are damaged and neither posteriors nor predictions are left to show. Raises DataError then."""
    if subject.damaged and isinstance(subject.judgement, Missing) and isinstance(subject.groups, Missing):
        first = subject.damaged[0]
        raise DataError(
            f"{subject.run.folder.root} has nothing left to report on: {first.name}: {first.what}",
            code="damaged",
            hint=first.command,
            path=first.path,
        )
