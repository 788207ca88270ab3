"""Commands that take several checkpoints: a run for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bnncli.errors import UsageError
from bnncli.run.session import Run


def each_checkpoint(run: Run) -> list[Run]:
    """A run for each checkpoint. Raises UsageError for one that is named twice, or a run folder with several."""
    paths = [Path(path) for path in run.arguments["ckpt"]]
    if len(paths) > 1 and run.run_options.run_dir is not None:
        raise UsageError("\0run_dir\0 names the run folder of one checkpoint; got several checkpoints")
    runs = [replace(run, arguments={**run.arguments, "ckpt": path}, heads={}) for path in paths]
    roots = [one.folder.root.resolve() for one in runs]
    for place, root in enumerate(roots):
        if root in roots[:place]:
            raise UsageError(f"{paths[place]} is given twice; give each seed's checkpoint once")
    return runs
