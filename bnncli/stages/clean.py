"""clean: removes temporary files and resume states of dead runs; never an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.errors import Locked, MissingInput
from bnncli.options.command import READ, Command
from bnncli.run.session import Result, Run
from bnncli.storage import resume
from bnncli.storage.atomic import temporaries, write_error
from bnncli.storage.locks import artifact_lock
from bnncli.storage.run_folder import FEATURES_SUFFIX, POSTERIOR_SUFFIXES

COMMAND = Command(
    "Remove what dead runs left behind: temporary files and resume states. Never an artifact.",
    "Files of processes that still run are kept.",
    (*READ,),
    ("bnncli clean ckpt.pt",),
    place=170,
)


def run(run: Run, options: Any) -> Result:
    """Remove what dead processes left in the run folder; the result lists it."""
    root = run.folder.root
    if not root.is_dir():
        raise MissingInput(f"{run.checkpoint_path} has no run folder (looked for {root})", path=root)
    states = resume.leftovers(root)
    trained = resume.state_path(run.checkpoint_path)  # of train, which writes the checkpoint itself
    states += [trained] if trained.is_file() else []
    leftovers = temporaries(root) + [path for path in states if not _is_in_use(run, path)]
    for path in leftovers:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(error, path) from None
    removed = [str(path) for path in leftovers]
    return Result(extra={"removed": removed}, lines=removed, summary=[f"removed {len(removed)} files"])


def _is_in_use(run: Run, leftover: Path) -> bool:
    """True when a live process is making the artifact that a resume state belongs to."""
    for suffix in (*POSTERIOR_SUFFIXES, FEATURES_SUFFIX):  # a checkpoint of train's has the first
        lock = run.folder.lock(leftover.with_name(resume.artifact_stem(leftover) + suffix))
        try:
            if lock.exists():
                with artifact_lock(lock, wait=0, poll=run.console.poll):
                    pass
        except Locked:
            run.console.info(f"{leftover}: kept, a running bnncli uses it")
            return True
    return False
