"""rm: remove posteriors and predictions by name, with the predictions, scores and rules made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.errors import MissingInput, UsageError
from bnncli.names import near_miss
from bnncli.options.command import CKPT, READ, Argument, Command, LockOptions, own_options
from bnncli.options.declaration import option
from bnncli.session.run import Result, Run
from bnncli.session.states import artifact_files, dependents, remove_artifacts

COMMAND = Command(
    "Remove posteriors or predictions, and everything made from them.",
    "Also removes predictions, metrics, decisions, monitors and recommendations made from them. Refuses if another posterior "
    "or an export depends on them, unless you name it too or pass --dependents.",
    (
        own_options(
            dependents=option(False, "Also remove posteriors and exports made from the named ones."),
            dry_run=option(False, "Print what would be removed, without removing it.", short="-n"),
        ),
        LockOptions,
        *READ,
    ),
    (
        "bnncli rm ckpt.pt laplace-prior3 --dry-run",
        "bnncli rm ckpt.pt laplace --dependents",
        "bnncli rm ckpt.pt hmc.mc",
    ),
    (CKPT, Argument("name", "Posteriors (laplace) or predictions (laplace.mc) of the run.", is_many=True)),
    section="Files",
    place=40,
)


def execute(run: Run, options: Any) -> Result:
    """Remove what is named and what was made from it. The result lists it.

    Raises:
        MissingInput: nothing in the run has the name.
        UsageError: a posterior or an export was made from what is named. Nothing is removed.
    """
    files = artifact_files(run)
    named = [path for name in run.arguments["name"] for path in _find_files(run, str(name))]
    further = dependents(run, files, named)
    kept = [path for path in further if path.parent.name in ("posteriors", "exports")]
    if kept and not options.dependents:
        names = ", ".join(path.stem for path in kept)
        raise UsageError(
            f"other posteriors or exports depend on these: {names}; nothing was removed",
            hint="name them too, or add --dependents to remove them as well",
            code="has_dependents",
            path=kept[0],
        )
    gone = list(dict.fromkeys([*named, *further]))
    if not options.dry_run:
        remove_artifacts(run, gone)
    removed = [str(path) for path in gone]
    count = f"{len(removed)} file" + "s" * (len(removed) != 1)
    done = f"would remove {count}" if options.dry_run else f"removed {count}"
    return Result("planned" if options.dry_run else "", extra={"removed": removed}, lines=removed, summary=[done])


def _find_files(run: Run, name: str) -> list[Path]:
    """Return the files of the posterior or predictions `name`. Raises MissingInput where there are none."""
    posteriors, predictions = run.folder.posteriors(), run.folder.prediction_files()
    found = [path for path in posteriors if path.stem == name] or [p for p in predictions if p.parent.name == name]
    if found:
        return found
    names = list(dict.fromkeys([*(path.stem for path in posteriors), *(path.parent.name for path in predictions)]))
    raise MissingInput(
        f"no posterior or predictions {name!r} in {run.folder.root} (have: {', '.join(names) or 'none'})",
        hint=near_miss(name, names) or run.suggest("status"),
    )
