"""Requests for features of changed data: noted beside the old features until they have come through."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import UNFINISHED, leave_note, request_digest, take_note_away
from bnncli.errors import NOT_OF_CONTENT, BnnError
from bnncli.options.declaration import spelled
from bnncli.session.produce import Request, Work, produce_together
from bnncli.session.run import Result, Run


def note_changed(run: Run, requests: Sequence[Request]) -> None:
    """Note every request whose data are not those of the features that are there, before any of them is worked on."""
    for request in requests:
        if is_of_other_data(request):
            _note(run, request, UNFINISHED)


def settle(run: Run, works: Sequence[Work], *, also: Callable[[], list[Result]]) -> list[Result]:
    """What `produce_together` gives; the notes of the requests for features say why where it raises, else they are gone.

    While the files take their names, a note lies beside each that is replaced: a command that ends in between leaves
    splits of two requests, and each then tells of which it is.
    """
    requests = [work.request for work in works if work.request.kind == "features"]
    digests = {one.target: request_digest(one.params, one.sources) for one in requests}
    earlier: dict[Path, int | None] = {}

    def before(targets: Sequence[Path]) -> None:
        earlier.update({target: _inode(target) for target in targets})
        together = {target.stem: digests[target] for target in targets if target in digests}
        for target in targets if len(targets) > 1 else ():
            if target in digests and target.is_file():
                leave_note(target, reason=UNFINISHED, request=digests[target], together=together)

    try:
        results = produce_together(run, works, also=also, before=before)
    except BnnError as error:
        if all(_inode(target) == number for target, number in earlier.items()):  # no file has its name
            _say_why(run, requests, error.message, noted=earlier)
        raise
    if not run.write.dry_run:
        for request in requests:
            take_note_away(request.target)
    return results


def _inode(target: Path) -> int | None:
    """Which file has a name."""
    return target.stat().st_ino if target.exists() else None


def _say_why(run: Run, requests: Sequence[Request], reason: str, *, noted: Collection[Path]) -> None:
    """Note why newer data did not come through; a note about anything else is not needed, as nothing was changed."""
    for request in requests:
        if is_of_other_data(request):
            _note(run, request, reason)
        elif request.target in noted:
            take_note_away(request.target)


def is_of_other_data(request: Request) -> bool:
    """Whether there are features, of other data than those that are asked for."""
    if not request.target.is_file():
        return False
    try:
        header = read_header(request.target)
    except NOT_OF_CONTENT:
        raise
    except BnnError:  # nothing can be made of them
        return False
    then = {entry["role"]: entry["content_digest"] for entry in header.inputs}
    return any(then.get(one.role) != one.content_digest for one in request.sources if one.role.startswith("data."))


def _note(run: Run, request: Request, reason: str) -> None:
    if not run.write.dry_run:
        digest = request_digest(request.params, request.sources)
        _try(run, lambda: leave_note(request.target, reason=spelled(reason), request=digest))


def _try(run: Run, write: Callable[[], None]) -> None:
    """Write a note; where that fails, what the command itself says matters more."""
    try:
        write()
    except BnnError as error:
        run.console.warn(f"cannot record that newer data were requested: {error.message}")
