"""clean: removes temporary files and resume states of dead runs; never an artifact."""

from __future__ import annotations

from typing import Any

from bnncli.errors import MissingInput
from bnncli.stages._run import Result, Run
from bnncli.storage.atomic import temporaries, write_error


def run(run: Run, options: Any) -> Result:
    """Remove what dead processes left in the run folder; the result lists it."""
    root = run.folder.root
    if not root.is_dir():
        raise MissingInput(f"{run.checkpoint_path} has no run folder (looked for {root})", path=root)
    leftovers = temporaries(root) + sorted(root.rglob(".*.resume.safetensors"))
    for path in leftovers:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(error, path) from None
    removed = [str(path) for path in leftovers]
    return Result(extra={"removed": removed}, lines=removed, summary=[f"removed {len(removed)} files"])
