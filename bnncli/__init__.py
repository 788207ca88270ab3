"""Post-hoc Bayesian classifiers from saved checkpoints: the package behind the `bnncli` command, and its Python API.

`bnncli.open("ckpt.pt")` returns the run of a checkpoint: its splits, posteriors and metrics, predictions for arrays, and the
commands as methods. `bnncli.from_torch` and `bnncli.from_features` make a run without a checkpoint file. Importing bnncli
imports nothing heavy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if sys.version_info < (3, 11):  # noqa: UP036 (from a source tree, where no installer has looked)
    raise ImportError("bnncli needs Python 3.11 or newer; this is Python {}.{}".format(*sys.version_info))

from bnncli import errors

if TYPE_CHECKING:
    from os import PathLike

    from bnncli.api.classifier import BayesianClassifier as BayesianClassifier
    from bnncli.api.create import from_features as from_features
    from bnncli.api.create import from_predictions as from_predictions
    from bnncli.api.create import from_torch as from_torch
    from bnncli.api.run import OpenedRun
else:  # imported when first used

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"bnncli.api.{_PLACES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_PLACES})


_PLACES = {
    "BayesianClassifier": "classifier",
    **dict.fromkeys(("from_features", "from_predictions", "from_torch"), "create"),
}
__all__ = [
    "BayesianClassifier",
    "errors",
    "from_features",
    "from_predictions",
    "from_torch",
]  # not `open`, so that a star import does not hide Python's own
__version__ = "1.0.0"


def open(
    ckpt: str | PathLike[str],
    *,
    run_dir: str | PathLike[str] | None = None,
    device: str = "auto",
    seed: int = 0,
    model: str | None = None,
) -> OpenedRun:
    """Open the run of a checkpoint. Nothing is computed or read until you ask for it.

    Args:
        ckpt: the checkpoint, or the name of a run without one.
        run_dir: the run folder, if it is not the one beside the checkpoint.
        device: auto (a CUDA GPU if there is one), cpu, cuda, cuda:N or mps (for networks).
        seed: seed of every random stream; with a command's seed you get its numbers.
        model: the network, as passed to `extract-features --model`. Needed only to predict for inputs, and only if it is your
            own code (`file.py:factory`, `package.module:factory`), which is then executed, or a saved model (`hf:DIR` and the
            like), which is then loaded.

    Raises:
        bnncli.errors.BnnError: as the commands, with keyword arguments in place of options: MissingInput if there is no such
            run, UsageError for a bad value.
    """
    from bnncli.api.run import open_run

    return open_run(ckpt, run_dir=run_dir, device=device, seed=seed, model=model)
