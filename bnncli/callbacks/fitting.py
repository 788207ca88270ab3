"""What the callbacks share: a posterior of the trained network, and what to do if it cannot be fitted."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from bnncli.api.commands import METHODS, CommandResult, check_keywords
from bnncli.api.create import from_torch
from bnncli.api.run import BATCH_SIZE, OpenedRun
from bnncli.errors import BnnError, BnnWarning, UsageError
from bnncli.session.tracking import list_numbers

Key = str | int | Callable[[Any], Any]
_LOGGED = re.compile(r"val/.+/(nll|ece|accuracy)|val_nll_(before|after)")


class PosteriorFit:
    """Fit a posterior to a network when its training ends.

    Args:
        method: temperature, stack, laplace, refine, hmc, or auto, which tries several and recommends one.
        train, val: data as for `bnncli.from_torch`; by default the trainer's own, each example once and in order.
        inputs, labels: where a batch has them, as a key, an index or a function of the batch. By default a batch is a pair, or a
            dict with `labels`.
        folder: folder of the run, which `bnncli.open(folder / "run")` opens later; a temporary one by default, deleted with it.
        last_layer: name of the last linear layer; found by default.
        seed: seed of the fit.
        force: replace an earlier run in the folder.
        on_error: warn, which leaves the finished training as it is, or raise.
        options: further options of the method's command, such as structure="kron".

    Attributes:
        run: the run with the posterior, when training has ended; None before, and if there is none.
        result: of the method's command, with all its numbers.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        method: str = "laplace",
        *,
        train: Any = None,
        val: Any = None,
        inputs: Key | None = None,
        labels: Key | None = None,
        folder: str | PathLike[str] | None = None,
        last_layer: str | None = None,
        seed: int = 0,
        force: bool = False,
        on_error: str = "warn",
        **options: Any,
    ) -> None:
        if method not in METHODS:
            raise UsageError(f"method: expected one of {', '.join(METHODS)}; got {method!r}")
        if on_error not in ("warn", "raise"):
            raise UsageError(f"on_error: expected warn or raise; got {on_error!r}")
        if (inputs is None) != (labels is None):
            raise UsageError("give both inputs and labels, or neither")
        check_keywords(METHODS[method][-1], options, method="FitPosterior")
        self.method, self.on_error, self.options = method, on_error, options
        self.train, self.val = train, val
        self.pick = None if inputs is None or labels is None else Pick(inputs, labels)
        self.place: dict[str, Any] = {"folder": folder, "last_layer": last_layer, "seed": seed, "force": force}
        self.run: OpenedRun | None = None
        self.result: CommandResult | None = None

    def fit(self, module: nn.Module, train: Any, val: Any, *, device: str) -> dict[str, float]:
        """Fit the posterior, and return its scores on val by name, such as bnncli/val/laplace/nll.

        Raises:
            BnnError: there is no validation data, or as `from_torch` and the method.
        """
        data = {name: read_in_order(one, self.pick, name) for name, one in (("train", train), ("val", val))}
        with _keep_random_states():
            run = from_torch(module, **data, device=device, **self.place)
            *first, last = METHODS[self.method]
            for command in first:
                getattr(run, command.replace("-", "_"))(force=self.place["force"])
            result = getattr(run, last.replace("-", "_"))(**{"force": self.place["force"], **self.options})
        self.run, self.result = run, result
        numbers = list_numbers(result.document)
        return {f"bnncli/{name}": number for name, number in numbers.items() if _LOGGED.fullmatch(name)}

    @contextmanager
    def tolerate(self) -> Iterator[None]:
        """Warn of an error in the block, or raise it if that was asked for."""
        try:
            yield
        except Exception as error:  # foreign code too: a finished training must not be lost
            if self.on_error == "raise":
                raise
            text = (
                f"{error.message}{error.advice}" if isinstance(error, BnnError) else f"{type(error).__name__}: {error}"
            )
            message = f"no posterior was fitted: {' '.join(text.split())}"
            warnings.warn(message, BnnWarning, stacklevel=4)


@dataclass(frozen=True)
class Pick:
    """Take inputs and labels from a batch."""

    inputs: Key
    labels: Key
    collate: Callable[[Any], Any] | None = None

    def __call__(self, examples: Any) -> tuple[Any, Any]:
        """Return inputs and labels of examples, collated first."""
        batch = examples if self.collate is None else self.collate(examples)
        inputs, labels = (key(batch) if callable(key) else batch[key] for key in (self.inputs, self.labels))
        return inputs, labels


_WHOLE = (RandomSampler, SequentialSampler, DistributedSampler)  # samplers of all examples, in some order


def read_in_order(data: Any, pick: Pick | None, name: str) -> Any:
    """Return a loader of the examples of a DataLoader or Dataset, each once and in order; other data as given.

    Raises:
        UsageError: there are no data, or several loaders.
    """
    given = list(data.values()) if isinstance(data, dict) else data if isinstance(data, list) else [data]
    if len(given) != 1 or given[0] is None:
        found = f"{len(given)} data loaders" if len(given) > 1 else "no data"
        raise UsageError(f"{name}: {found}; pass {name}= to FitPosterior")
    (data,) = given
    if isinstance(data, Dataset):
        data = DataLoader(data, BATCH_SIZE)
    if not isinstance(data, DataLoader):
        return data
    sampler: Any = data.sampler
    if isinstance(sampler, SubsetRandomSampler):
        sampler = sorted(int(row) for row in sampler.indices)
    elif isinstance(sampler, _WHOLE) or data.batch_size is None:
        sampler = None
    is_batched = data.batch_size is not None or data.batch_sampler is not None
    size = data.batch_size or getattr(data.batch_sampler, "batch_size", None) or BATCH_SIZE
    return DataLoader(
        data.dataset,
        batch_size=size if is_batched else None,
        sampler=None if isinstance(data.dataset, IterableDataset) else sampler,
        collate_fn=data.collate_fn if pick is None else Pick(pick.inputs, pick.labels, data.collate_fn),
        num_workers=data.num_workers,
        worker_init_fn=data.worker_init_fn,
    )


@contextmanager
def _keep_random_states() -> Iterator[None]:
    """Restore the random states of Python and NumPy, which data sets may use; those of torch are kept by each call."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
