"""Artifacts that belong together: all are made before any takes its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bnncli.artifacts.atomic import published_together
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.run.produce import Computed, Request, make, produce, ready_where_nothing_can_be_written
from bnncli.run.session import Result, Run


class Work(NamedTuple):
    """One artifact of several: what was asked for, and what makes it."""

    request: Request
    compute: Callable[[], Computed]


def produce_together(
    run: Run,
    works: Sequence[Work],
    *,
    also: Callable[[], list[Result]],
    before: Callable[[Sequence[Path]], None],
) -> list[Result]:
    """The result of each request; what they make takes its names at the end, the last first.

    Args:
        also: produces what else belongs with them, when they are made; not in a dry run.
        before: called with the files that are about to take their names, all of them whole.

    Raises:
        BnnError: as produce does; nothing is published then, unless the error comes while names are taken.
    """
    if run.write.dry_run:
        return [produce(run, *work) for work in works]
    ready = [ready_where_nothing_can_be_written(run, work.request) for work in works]
    open_works = [place for place, result in enumerate(ready) if result is None]
    with ExitStack() as locks:
        # In the order of their names: two commands that wait for each other's would wait for ever.
        for lock in sorted({run.folder.lock(works[place].request.target) for place in open_works}):
            locks.enter_context(artifact_lock(lock, wait=run.lock.wait, poll=run.console.poll))
        with published_together(before):
            for place in open_works:
                ready[place] = make(run, *works[place])
            ready += also()
    return [result for result in ready if result is not None]
