"""Runs from features or a torch module in memory, without a checkpoint file or a shell."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bnncli.api.commands import CommandResult, run_command
from bnncli.api.run import BATCH_SIZE, OpenedRun
from bnncli.api.session import (
    Items,
    Session,
    check_finite,
    check_number,
    check_text,
    convert_errors_to_python,
    describe_inputs,
    refuse_exits,
)
from bnncli.data.arrays import ArrayDataset, NamedArrays
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.models.features import extract
from bnncli.models.head_search import find_head
from bnncli.numerics.digests import tensor_digest
from bnncli.options.declaration import check_split_name
from bnncli.system.devices import keep_random_state, keep_settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.models.head import Head

Batch: TypeAlias = "tuple[Any, Any]"  # inputs and labels, or None
_NAME = "run"  # of a run without a checkpoint, in its folder


def from_features(splits: Mapping[str, Any], ood: Mapping[str, Any], head: Any, **options: Any) -> OpenedRun:
    """Make a run of features; see `bnncli.from_features`."""
    with convert_errors_to_python():
        arrays = dict(zip(("head_weight", "head_bias"), _head_arrays(head), strict=True))
        for name, given in _named_splits(splits, ood).items():
            x, y = _pair(given)
            features = _numpy(x, f"{name}: features")
            arrays[f"features_{name}"] = features if features.dtype.kind == "f" else features.astype(np.float32)
            arrays[f"labels_{name}"] = None if y is None else _numpy(y, f"{name}: labels")
        return _make_run(
            {name: one for name, one in arrays.items() if one is not None}, [*ood], method="from_features", **options
        )


def from_torch(
    module: nn.Module,
    splits: Mapping[str, Any],
    ood: Mapping[str, Any],
    *,
    last_layer: str | None,
    batch_size: int,
    **options: Any,
) -> OpenedRun:
    """Make a run of a module and data; see `bnncli.from_torch`."""
    with convert_errors_to_python():
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"model: expected a torch.nn.Module; got {type(module).__name__}")
        batch_size = check_number("batch_size", batch_size, least=1)
        named = _named_splits(splits, ood)
        with _computing(module):
            network = ModuleNetwork.of(
                module, _batches(next(iter(named.values())), batch_size, next(iter(named))), last_layer
            )
            arrays: dict[str, np.ndarray] = {"head_weight": network.head.weight.numpy()}
            if network.head.bias is not None:
                arrays["head_bias"] = network.head.bias.numpy()
            for name, given in named.items():
                features, labels = network.run(_batches(given, batch_size, name), name, is_labeled=name not in ood)
                arrays[f"features_{name}"] = features.numpy()
                if labels is not None:
                    arrays[f"labels_{name}"] = labels
        run = _make_run(arrays, [*ood], method="from_torch", **options)
        run.module_network = network
        return run


class GivenPredictions:
    """Predictions of any origin, to score.

    Attributes:
        session: of their file, which is deleted with it.
    """

    def __init__(self, session: Session, outside: Mapping[str, Path]) -> None:
        self.session, self._outside = session, outside

    def evaluate(self, *, progress: bool = False, **options: Any) -> CommandResult:
        """Return the scores of `bnncli score`, with its options as keywords, such as per_class=True.

        Raises:
            bnncli.errors.BnnError: as score, such as DataError for rows that do not sum to one.
        """
        ood = [f"{name}={path}" for name, path in self._outside.items()]
        return run_command(self.session, "score", {"ood": ood, **options}, method="evaluate", progress=progress)


def from_predictions(predictions: Any, labels: Any, ood: Mapping[str, Any], *, are_logits: bool) -> GivenPredictions:
    """Take predictions; see `bnncli.from_predictions`."""
    with convert_errors_to_python():
        what, place = "logits" if are_logits else "probs", _temporary_folder()
        session = Session(str(place / "predictions.npz"), None, device="cpu", seed=0)
        weakref.finalize(session, _remove, place, os.getpid())
        arrays = {what: _numpy(predictions, "predictions")}
        if labels is not None:
            arrays["labels"] = _numpy(labels, "labels")
        np.savez(place / "predictions.npz", **arrays)  # type: ignore[arg-type]
        outside = {check_split_name(name, "ood"): place / f"{name}.npz" for name in ood}
        for name, path in outside.items():
            np.savez(path, **{what: _numpy(ood[name], f"ood: {name}")})  # type: ignore[arg-type]
        return GivenPredictions(session, outside)


def _named_splits(splits: Mapping[str, Any], ood: Mapping[str, Any]) -> dict[str, Any]:
    """Return all splits that were given, train first.

    Raises:
        UsageError: there is none, or a name is invalid or given twice.
    """
    given = {name: one for name, one in splits.items() if one is not None}
    for name in ood:
        if check_split_name(name, "ood") in splits:
            raise UsageError(f"ood: {name!r} is the name of another split")
    if not given:
        raise UsageError("train: give at least one split, such as train=(x, y)")
    return {**given, **ood}


def _make_run(
    arrays: Mapping[str, np.ndarray],
    ood: list[str],
    *,
    folder: str | PathLike[str] | None,
    device: str,
    seed: int,
    method: str,
    **options: Any,
) -> OpenedRun:
    """Write the arrays into a folder, or a temporary one that is deleted with the run's session, and extract them."""
    place = _temporary_folder() if folder is None else Path(fspath(folder)).absolute()
    place.mkdir(parents=True, exist_ok=True)
    device, seed = check_text("device", device), check_number("seed", seed, least=0)
    session = Session(str(place / _NAME), None, device=device, seed=seed)
    if folder is None:
        weakref.finalize(session, _remove, place, os.getpid())
    np.savez(place / "features.npz", **arrays)  # type: ignore[arg-type]
    given = {"from_npz": place / "features.npz", "ood": ood, **options}
    run_command(session, "extract-features", given, method=method)
    return OpenedRun(session, None)


def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bnncli-")).absolute()


def _remove(folder: Path, pid: int) -> None:
    """Remove a temporary folder, but not in a process forked from the one that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _pair(given: Any) -> Batch:
    """Return inputs and labels of (x, y), or x without labels."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, None)


def _numpy(value: Any, what: str) -> np.ndarray:
    """Return an array of numbers.

    Raises:
        DataError: the value is something else.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{what}: expected an array of numbers; got {type(value).__name__} of type {array.dtype}")
    return array


def _head_arrays(head: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return weight (K, D) and bias (K,) of a pair, a torch.nn.Linear or a linear classifier of scikit-learn.

    Raises:
        UsageError: it is something else, or its classes are not 0 to K - 1.
    """
    if head is None:
        return None, None
    if hasattr(head, "coef_"):
        if list(head.classes_) != list(range(len(head.classes_))):
            raise UsageError(
                "head: expected classes 0 to K - 1; encode the labels (sklearn.preprocessing.LabelEncoder)"
            )
        head = head.coef_, head.intercept_
    elif isinstance(head, torch.nn.Linear):
        head = head.weight, head.bias
    if not isinstance(head, tuple) or len(head) != 2:
        raise UsageError("head: expected (weight, bias), a torch.nn.Linear or a fitted LogisticRegression")
    weight, bias = head
    weight = _numpy(weight, "head weight").astype(np.float32)
    return weight, None if bias is None else np.broadcast_to(_numpy(bias, "head bias"), len(weight)).astype(np.float32)


def _batches(given: Any, batch_size: int, name: str) -> Iterator[Batch]:
    """Yield inputs and labels of arrays, a Dataset or a DataLoader, batch by batch.

    Raises:
        UsageError: it is something else.
    """
    from torch.utils.data import DataLoader, Dataset

    if isinstance(given, Dataset):
        given = DataLoader(given, batch_size)
    if isinstance(given, DataLoader):
        for batch in given:
            if isinstance(batch, Mapping):
                label = next((name for name in ("labels", "label") if name in batch), None)
                yield {name: one for name, one in batch.items() if name != label}, batch.get(label)
            else:
                yield _pair(tuple(batch) if isinstance(batch, list) else batch)
        return
    x, y = _pair(given)
    if not hasattr(x, "__getitem__") or not hasattr(x, "__len__"):
        raise UsageError(f"{name}: expected (x, y), a Dataset or a DataLoader; got {type(x).__name__}")
    for start in range(0, len(x), batch_size):
        rows = slice(start, start + batch_size)
        yield x[rows], None if y is None else y[rows]


@contextmanager
def _computing(module: nn.Module) -> Iterator[None]:
    """Restore torch's settings and random state, and the mode of every part of a module, after the block."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        with keep_settings(), keep_random_state(), refuse_exits():
            yield
    finally:
        for part, is_training in modes:
            part.training = is_training


@dataclass
class ModuleNetwork:
    """A module in memory and its last layer.

    Attributes:
        states: address and version of each weight, which change with it; compared before `digest`.
    """

    module: nn.Module
    head: Head
    digest: str
    states: list[tuple[int, int]]

    @classmethod
    def of(cls, module: nn.Module, batches: Iterable[Batch], last_layer: str | None) -> ModuleNetwork:
        """Find the last layer, with the first batch of some data.

        Raises:
            DataError, UsageError: there is none, or the module does not take the data.
        """
        first = next(iter(batches), None)
        if first is None:
            raise DataError("train: no examples", code="empty_split")
        example, device = _split(first, "train"), _device_of(module)
        head = find_head(
            module, lambda count: next(example.batches(count, device=device)).inputs, layer=last_layer, output=None
        )
        return cls(module, head, _digest_of(module), _states_of(module))

    def run(self, batches: Iterable[Batch], name: str, *, is_labeled: bool) -> tuple[Tensor, np.ndarray | None]:
        """Return features (N, D) float32 on the CPU and labels of all batches."""
        found, labels, num_checked = [], [], 0
        for batch in batches:
            split = _split(batch, name)
            for part in extract(
                self.module,
                self.head,
                split,
                batch_size=len(split),
                device=_device_of(self.module),
                num_logits=0,
                num_checked=num_checked,
            ):
                found.append(part.features)
                num_checked = max(num_checked, min(len(part.features), 2))
            if is_labeled and batch[1] is not None:
                labels.append(_numpy(batch[1], f"{name}: labels"))
        if not found:
            raise DataError(f"{name}: no examples", code="empty_split")
        return torch.cat(found), np.concatenate(labels) if labels else None

    def features(self, inputs: Tensor | Items) -> Tensor:
        """Return features (N, D) of inputs (N, ...) on the CPU.

        Raises:
            DataError: the module cannot take the inputs, or its weights have changed.
        """
        if isinstance(inputs, Items):
            raise DataError(f"x: expected arrays for the module; got {describe_inputs(inputs)}", code="wrong_inputs")
        check_finite(inputs)
        self.check_weights()
        with _computing(self.module):
            return self.run(_batches(inputs, BATCH_SIZE, "x"), "x", is_labeled=False)[0]

    def check_weights(self) -> None:
        """Check that the module's weights are those of the run.

        Raises:
            DataError: they have changed.
        """
        states = _states_of(self.module)
        if states != self.states and _digest_of(self.module) != self.digest:
            hint = "make another run: bnncli.from_torch(model, ...)"
            raise DataError("the module's weights have changed since the run was made", code="stale_input", hint=hint)
        self.states = states


def _split(batch: Batch, name: str) -> InputSplit:
    """Return a batch's inputs, one array or several by name, as a split without labels."""
    x, _ = batch
    if isinstance(x, Mapping):
        arrays = {key: _numpy(one, f"{name}: {key}") for key, one in x.items()}
        dataset: ArrayDataset | NamedArrays = NamedArrays(arrays, None)
    else:
        dataset = ArrayDataset(x.detach() if isinstance(x, torch.Tensor) else _numpy(x, f"{name}: inputs"), None)
    return InputSplit(name, dataset, np.arange(len(dataset)), Preprocess(), is_labeled=False, name=name)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: one for name, one in module.state_dict().items() if isinstance(one, torch.Tensor)}


def _states_of(module: nn.Module) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one._version) for one in _weights(module).values()]


def _digest_of(module: nn.Module) -> str:
    return tensor_digest({name: one.detach().cpu() for name, one in _weights(module).items()})


def _device_of(module: nn.Module) -> torch.device:
    return next((one.device for one in module.parameters()), torch.device("cpu"))
