"""clean: remove temporary files and resume states of dead processes and, with --stale, stale artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.artifacts import resume
from bnncli.artifacts.atomic import dead_temporaries, write_error
from bnncli.artifacts.run_folder import FEATURES_SUFFIX, POSTERIOR_SUFFIXES, artifact_lock
from bnncli.errors import Locked
from bnncli.options.command import READ, Command, LockOptions, own_options
from bnncli.options.declaration import option
from bnncli.session.run import Result, Run
from bnncli.session.states import STALE, artifact_files, artifact_states, remove_artifacts

COMMAND = Command(
    "Remove temporary files of dead runs, and stale artifacts with --stale.",
    "Keeps the files of processes that are still running. Never removes a damaged artifact, or one whose state "
    "is unknown.",
    (
        own_options(
            stale=option(False, "Also remove artifacts that status lists as stale."),
            dry_run=option(False, "Print what would be removed, without removing it.", short="-n"),
        ),
        LockOptions,
        *READ,
    ),
    ("bnncli clean ckpt.pt", "bnncli clean ckpt.pt --stale --dry-run"),
    section="Files",
    place=30,
)


def execute(run: Run, options: Any) -> Result:
    """Remove what dead processes left in the run folder and, with --stale, stale artifacts. The result lists them."""
    root = run.folder.root
    if not root.is_dir():
        raise run.no_run()
    states = resume.find_leftovers(root)
    trained = resume.state_path(run.checkpoint_path)  # of train, which writes the checkpoint itself
    states += [trained] if trained.is_file() else []
    leftovers = dead_temporaries(root) + [path for path in states if not _is_in_use(run, path)]
    stale = []
    if options.stale:
        known = artifact_states(run, artifact_files(run))
        stale = [one.path for one in known if one.state == STALE]
        if kept := [str(one.path) for one in known if one.state in ("invalid", "unknown")]:
            run.console.warn(f"kept, because their state is unknown: {', '.join(kept)}; see bnncli status")
    if not options.dry_run:
        for path in leftovers:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise write_error(error, path) from None
        remove_artifacts(run, stale)
    removed = [str(path) for path in (*leftovers, *stale)]
    count = f"{len(removed)} file" + "s" * (len(removed) != 1)
    done = f"would remove {count}" if options.dry_run else f"removed {count}"
    return Result("planned" if options.dry_run else "", extra={"removed": removed}, lines=removed, summary=[done])


def _is_in_use(run: Run, leftover: Path) -> bool:
    """True when a live process is making the artifact that a resume state belongs to."""
    for suffix in (*POSTERIOR_SUFFIXES, FEATURES_SUFFIX):  # a checkpoint of train's has the first
        lock = run.folder.lock(leftover.with_name(resume.artifact_stem(leftover) + suffix))
        try:
            if lock.exists():
                with artifact_lock(lock, wait=0, poll=run.console.poll):
                    pass
        except Locked:
            run.console.info(f"{leftover}: kept, because a running bnncli uses it")
            return True
    return False
