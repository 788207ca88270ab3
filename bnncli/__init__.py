"""Post-hoc Bayesian classifiers from saved checkpoints: the package behind the `bnncli` command, and its face in Python.

`bnncli.open("ckpt.pt")` gives the run that the commands have made: its splits, posteriors and metrics, and predictions for
arrays. Importing this imports nothing heavy.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.version_info < (3, 11):  # noqa: UP036 (from a source tree, where no installer has looked)
    raise ImportError("bnncli needs Python 3.11 or newer; this is Python {}.{}".format(*sys.version_info))

from bnncli import errors as errors

if TYPE_CHECKING:
    from os import PathLike

    from bnncli.opened import OpenedRun

__all__ = ["errors"]  # not `open`: Python's own is not to be hidden by an import of all
__version__ = "0.1.0"


def open(
    ckpt: str | PathLike[str],
    *,
    run_dir: str | PathLike[str] | None = None,
    device: str = "auto",
    seed: int = 0,
    model: str | None = None,
) -> OpenedRun:
    """The run of a checkpoint, as the commands left it. Nothing is computed, and no posterior read, before it is asked for.

    Args:
        ckpt: the checkpoint, or the name of a run that has none.
        run_dir: the run folder, where it is not the one beside the checkpoint.
        device: to compute on: auto (a GPU where there is one), cpu, cuda or cuda:N.
        seed: of every random stream: with that of a command, its numbers.
        model: the network that the features were made by, as `extract-features` was told it; needed only to predict for
            inputs, and only where it is code of yours (`file.py:factory`, `package.module:factory`), which is then run, or
            a saved model (`hf:DIR` and the like), which is then loaded.

    Raises:
        bnncli.errors.BnnError: as the commands say it, with the keywords of these functions for the commands' options:
            MissingInput where there is no such run, UsageError for a value that an argument does not take.
    """
    from bnncli.opened.run import open_run

    return open_run(ckpt, run_dir=run_dir, device=device, seed=seed, model=model)
