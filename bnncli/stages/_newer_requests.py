"""Requests for features of changed data: noted beside the old features until they have come through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bnncli.errors import BnnError, UsageError
from bnncli.stages._produce import Computed, Request, produce
from bnncli.stages._run import Result, Run
from bnncli.storage.headers import read_header
from bnncli.storage.newer_request import UNFINISHED, leave_note, request_digest, take_note_away


def note_changed(run: Run, requests: Sequence[Request]) -> None:
    """Note every request whose data are not those of the features that are there, before any of them is worked on."""
    for request in requests:
        if _is_of_other_data(request):
            _note(run, request, UNFINISHED)


def settle(run: Run, request: Request, compute: Callable[[], Computed]) -> Result:
    """What `produce` gives; the request's note says why where it raises, and is gone where it does not."""
    try:
        result = produce(run, request, compute)
    except BnnError as error:
        if _is_of_other_data(request):
            _note(run, request, error.message)
        raise
    if not run.write.dry_run:
        take_note_away(request.target)
    return result


def note_unreadable(run: Run, splits: Iterable[str], error: BnnError) -> None:
    """Note that the data asked for could not be read, beside the features that these splits have."""
    if isinstance(error, UsageError) or run.write.dry_run:
        return
    for name in splits:
        target = run.folder.features(name)
        if target.is_file():
            _try(run, lambda target=target: leave_note(target, reason=error.message, request=None))  # type: ignore[misc]


def _is_of_other_data(request: Request) -> bool:
    """Whether there are features, of other data than those that are asked for."""
    if not request.target.is_file():
        return False
    try:
        header = read_header(request.target)
    except BnnError:  # nothing can be made of them
        return False
    then = {entry["role"]: entry["content_digest"] for entry in header.inputs}
    return any(then.get(one.role) != one.content_digest for one in request.sources if one.role.startswith("data."))


def _note(run: Run, request: Request, reason: str) -> None:
    if not run.write.dry_run:
        digest = request_digest(request.params, request.sources)
        _try(run, lambda: leave_note(request.target, reason=reason, request=digest))


def _try(run: Run, write: Callable[[], None]) -> None:
    """Write a note; where that fails, what the command itself says matters more."""
    try:
        write()
    except BnnError as error:
        run.console.warn(f"the run does not note that newer data were asked for: {error.message}")
