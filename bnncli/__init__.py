"""Post-hoc Bayesian classifiers from saved checkpoints: the package behind the `bnncli` command, and its Python API.

`bnncli.open("ckpt.pt")` returns the run of a checkpoint: its splits, posteriors and metrics, predictions for arrays, and the
commands as methods. `bnncli.from_torch` and `bnncli.from_features` make a run without a checkpoint file. Importing bnncli
imports nothing heavy.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.version_info < (3, 11):  # noqa: UP036 (from a source tree, where no installer has looked)
    raise ImportError("bnncli needs Python 3.11 or newer; this is Python {}.{}".format(*sys.version_info))

from bnncli import errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike
    from typing import Any

    from torch import nn

    from bnncli.api.classifier import BayesianClassifier as BayesianClassifier
    from bnncli.api.create import GivenPredictions
    from bnncli.api.run import OpenedRun
else:

    def __getattr__(name: str) -> object:
        """Import the classifier, and with it scikit-learn, when it is first used."""
        if name != "BayesianClassifier":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from bnncli.api.classifier import BayesianClassifier

        return BayesianClassifier


__all__ = [
    "BayesianClassifier",
    "errors",
    "from_features",
    "from_predictions",
    "from_torch",
]  # not `open`, so that a star import does not hide Python's own
__version__ = "0.1.0"


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
        device: auto (a GPU if there is one), cpu, cuda or cuda:N.
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


def from_features(
    train: Any = None,
    *,
    val: Any = None,
    test: Any = None,
    ood: Mapping[str, Any] | None = None,
    head: Any = None,
    folder: str | PathLike[str] | None = None,
    device: str = "auto",
    seed: int = 0,
    **options: Any,
) -> OpenedRun:
    """Make a run of features in memory, as `extract-features --from-npz` does of a file.

    Args:
        train, val, test: features (N, D) and labels as a tuple (x, y), or x alone. Arrays or tensors; labels are classes (N,)
            from 0, or zeros and ones (N, L).
        ood: out-of-distribution splits by name.
        head: the last layer: (weight (K, D), bias (K,) or None), a torch.nn.Linear, or a fitted linear classifier of
            scikit-learn.
        folder: folder of the run, which `open(folder / "run")` opens later; a temporary one by default, deleted with the run.
        device, seed: as for `open`.
        options: further options of `extract-features`, such as hold_out="val=test:2000", task or force.

    Raises:
        bnncli.errors.BnnError: as extract-features, such as DataError for features that are not finite.
    """
    from bnncli.api.create import from_features

    splits = {"train": train, "val": val, "test": test}
    return from_features(splits, ood or {}, head, folder=folder, device=device, seed=seed, **options)


def from_torch(
    model: nn.Module,
    train: Any = None,
    *,
    val: Any = None,
    test: Any = None,
    ood: Mapping[str, Any] | None = None,
    folder: str | PathLike[str] | None = None,
    last_layer: str | None = None,
    batch_size: int = 256,
    device: str = "auto",
    seed: int = 0,
    **options: Any,
) -> OpenedRun:
    """Make a run of a torch module: run it over data, as `extract-features` does, and keep its features and last layer.

    The module computes where its weights are, in evaluation mode, and is left as it was. Posteriors are over its last linear
    layer; other layers need a checkpoint and `extract-features --model`.

    Args:
        model: the trained network, which returns logits.
        train, val, test: arrays or tensors (x, y), a Dataset or a DataLoader of such pairs, or of dicts with `labels`. Inputs are
            what the module takes, but uint8 is scaled to [0, 1].
        ood: out-of-distribution splits by name, labels ignored.
        last_layer: name of the last linear layer; found by default.
        batch_size: examples in a forward pass; of a DataLoader, its own.
        folder, device, seed, options: as for `from_features`; the device is for fits.

    Raises:
        bnncli.errors.BnnError: as extract-features, such as DataError if the last layer does not give the module's output.
    """
    from bnncli.api.create import from_torch

    splits = {"train": train, "val": val, "test": test}
    own: dict[str, Any] = {"last_layer": last_layer, "batch_size": batch_size}
    return from_torch(model, splits, ood or {}, **own, folder=folder, device=device, seed=seed, **options)


def from_predictions(
    probs: Any = None, labels: Any = None, *, logits: Any = None, ood: Mapping[str, Any] | None = None
) -> GivenPredictions:
    """Take predictions of any model, to score them as `bnncli score` does: `from_predictions(probs, y).evaluate()`.

    Args:
        probs: class probabilities (N, C).
        labels: classes (N,) from 0, or zeros and ones (N, C).
        logits: logits (N, C) in place of probabilities.
        ood: predictions for out-of-distribution data by name.

    Raises:
        bnncli.errors.BnnError: UsageError unless either probabilities or logits are given.
    """
    from bnncli.api.create import from_predictions

    if (probs is None) == (logits is None):
        raise errors.UsageError("give either probs or logits")
    return from_predictions(logits if probs is None else probs, labels, ood or {}, are_logits=probs is None)
