"""Runs from features or a torch module in memory, without a checkpoint file or a shell."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
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
from bnncli.console import Console
from bnncli.data.arrays import ArrayDataset, NamedArrays
from bnncli.data.labels import common_task
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.models.features import extract
from bnncli.models.head import check_link
from bnncli.models.head_search import find_head
from bnncli.numerics.digests import tensor_digest
from bnncli.options.command import CommonOptions
from bnncli.options.declaration import check_split_name
from bnncli.progress import Task
from bnncli.system.devices import keep_random_state, keep_settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.evaluation.calibration_maps import CalibrationMap
    from bnncli.models.head import Head

Batch: TypeAlias = "tuple[Any, Any]"  # inputs and labels, or None
_NAME = "run"  # of a run without a checkpoint, in its folder


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
    with convert_errors_to_python():
        splits = _named_splits({"train": train, "val": val, "test": test}, ood or {})
        arrays = dict(zip(("head_weight", "head_bias"), _head_arrays(head), strict=True))
        for name, given in splits.items():
            x, y = _pair(given)
            features = _numpy(x, f"{name}: features")
            arrays[f"features_{name}"] = features if features.dtype.kind == "f" else features.astype(np.float32)
            arrays[f"labels_{name}"] = None if y is None or name in (ood or {}) else _numpy(y, f"{name}: labels")
        place: dict[str, Any] = {"folder": folder, "device": device, "seed": seed, "method": "from_features"}
        return _make_run(arrays, ood or {}, options, **place)


def from_torch(
    model: nn.Module,
    train: Any = None,
    *,
    val: Any = None,
    test: Any = None,
    ood: Mapping[str, Any] | None = None,
    folder: str | PathLike[str] | None = None,
    last_layer: str | None = None,
    batch_size: int = BATCH_SIZE,
    device: str = "auto",
    seed: int = 0,
    progress: bool = False,
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
        progress: show progress on stderr.
        folder, device, seed, options: as for `from_features`; the device is for fits.

    Raises:
        bnncli.errors.BnnError: as extract-features, such as DataError if the last layer does not give the module's output.
    """
    with convert_errors_to_python():
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"model: expected a torch.nn.Module; got {type(model).__name__}")
        batch_size = check_number("batch_size", batch_size, least=1)
        splits, outside = _named_splits({"train": train, "val": val, "test": test}, ood or {}), ood or {}
        with _computing(model), closing(Console("from_torch", CommonOptions(quiet=not progress))) as console:
            name, given = next(iter(splits.items()))
            network = ModuleNetwork.of(model, _batches(given, batch_size, name), last_layer)
            bias = network.head.bias
            arrays = {"head_weight": network.head.weight.numpy(), "head_bias": None if bias is None else bias.numpy()}
            known: dict[str, np.ndarray | None] = {}
            for name, given in splits.items():
                task = console.task(f"extract {name}", _count_rows(given))
                batches = _batches(given, batch_size, name)
                features, labels = network.run(batches, name, is_labeled=name not in outside, task=task)
                arrays |= {f"features_{name}": features.numpy(), f"labels_{name}": labels}
                known[name] = labels
            check_link(network.head, common_task(known, options.get("task")))
        place: dict[str, Any] = {"folder": folder, "device": device, "seed": seed, "method": "from_torch"}
        run = _make_run(arrays, outside, options, **place, progress=progress)
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

    def fit_calibration(self, map: str = "auto", *, progress: bool = False) -> FittedCalibration:
        """Fit a calibration map to the predictions, as `bnncli score --fit-calibration`.

        Args:
            map: name of a map; auto for the best one out of fold if it beats temperature, else temperature.

        Raises:
            bnncli.errors.BnnError: as score, such as DataError without labels.
        """
        from bnncli.session.calibration import read_map

        place = Path(self.session.path).with_name("map.safetensors")
        options = {"fit_calibration": map, "out": str(place), "bootstrap": 0}
        done = run_command(self.session, "score", options, method="fit_calibration", progress=progress)
        fitted, header = read_map(place)
        metrics, floor = done.to_dict()["calibration"], float(header.meta["floor"])
        return FittedCalibration(fitted.name, metrics, fitted, floor, place.read_bytes())


@dataclass(frozen=True, eq=False, repr=False)
class FittedCalibration:
    """A calibration map fitted to predictions: call it with new probabilities.

    Attributes:
        name: name of the map, such as isotonic.
        metrics: out-of-fold scores of each map that was tried, and why this one was chosen.
    """

    name: str
    metrics: Mapping[str, Any]
    _map: CalibrationMap
    _floor: float
    _content: bytes

    def __repr__(self) -> str:
        return f"<calibration map {self.name}: {self._map.likelihood.num_classes} classes>"

    def __call__(self, probs: Any = None, *, logits: Any = None) -> np.ndarray:
        """Return calibrated probabilities (N, C) float64 of probabilities, or logits, (N, C).

        Raises:
            bnncli.errors.BnnError: UsageError unless either is given; DataError for another number of classes.
        """
        from bnncli.session.calibration import convert_to_logits

        with convert_errors_to_python():
            if (probs is None) == (logits is None):
                raise UsageError("give either probs or logits")
            likelihood = self._map.likelihood
            given = _numpy(logits if probs is None else probs, "logits" if probs is None else "probs")
            if given.ndim != 2 or given.shape[1] != likelihood.num_classes:
                raise DataError(f"expected (N, {likelihood.num_classes}); got shape {given.shape}", code="bad_shape")
            if probs is None:
                given = likelihood.class_probabilities(torch.from_numpy(given).double(), dim=1).numpy()
            rows = convert_to_logits(given, self._floor, is_exclusive=likelihood.is_exclusive)
            return np.asarray(self._map.probs(torch.from_numpy(rows)).numpy())

    def save(self, path: str | PathLike[str]) -> None:
        """Write the map for `bnncli score --calibration`."""
        Path(path).write_bytes(self._content)


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
    with convert_errors_to_python():
        if (probs is None) == (logits is None):
            raise UsageError("give either probs or logits")
        what, given = ("probs", probs) if logits is None else ("logits", logits)
        session = _open_session(None, "predictions.npz", device="cpu", seed=0)
        place = Path(session.path)
        _save(place, {what: _numpy(given, what), "labels": None if labels is None else _numpy(labels, "labels")})
        outside = {check_split_name(name, "ood"): place.with_name(f"ood-{name}.npz") for name in ood or {}}
        for name, path in outside.items():
            _save(path, {what: _numpy((ood or {})[name], f"ood: {name}")})
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
    arrays: Mapping[str, np.ndarray | None],
    ood: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    folder: str | PathLike[str] | None,
    device: str,
    seed: int,
    method: str,
    progress: bool = False,
) -> OpenedRun:
    """Write the arrays into a folder, and extract them."""
    session = _open_session(
        folder, _NAME, device=check_text("device", device), seed=check_number("seed", seed, least=0)
    )
    path = Path(session.path).with_name("features.npz")
    _save(path, arrays)
    run_command(
        session, "extract-features", {"from_npz": path, "ood": [*ood], **options}, method=method, progress=progress
    )
    return OpenedRun(session, None)


def _open_session(folder: str | PathLike[str] | None, name: str, *, device: str, seed: int) -> Session:
    """Return the session of a name in a folder, or in a temporary one that is deleted with the session."""
    place = Path(tempfile.mkdtemp(prefix="bnncli-") if folder is None else fspath(folder)).absolute()
    place.mkdir(parents=True, exist_ok=True)
    session = Session(str(place / name), None, device=device, seed=seed)
    if folder is None:
        weakref.finalize(session, _remove, place, os.getpid())
    return session


def _save(path: Path, arrays: Mapping[str, np.ndarray | None]) -> None:
    """Write arrays to an npz file, without those that are None."""
    np.savez(path, **{name: one for name, one in arrays.items() if one is not None})  # type: ignore[arg-type]


def _remove(folder: Path, pid: int) -> None:
    """Remove a temporary folder, but not in a process forked from the one that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _pair(given: Any) -> Batch:
    """Return inputs and labels of (x, y), or x without labels."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, None)


def _count_rows(given: Any) -> int:
    """Return the number of examples of what `_batches` takes; 0 where it is unknown."""
    from torch.utils.data import DataLoader

    rows: Any = given.dataset if isinstance(given, DataLoader) else _pair(given)[0]
    try:
        return len(rows)
    except TypeError:  # an iterable data set
        return 0


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


def _class_labels(value: Any, name: str) -> np.ndarray:
    """Return labels (N,) or (N, L) of a batch as whole numbers; losses of two classes take floats, in a column or not.

    Raises:
        DataError: they are no classes.
    """
    labels = _numpy(value, f"{name}: labels")
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.dtype.kind != "f":
        return labels
    wrong = labels[labels != np.round(labels)]
    if len(wrong):
        message = f"{name}: labels must be classes, or zeros and ones; got {wrong.flat[0]:g} (regression targets?)"
        raise DataError(message, code="bad_labels")
    return labels.astype(np.int64)


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
            elif isinstance(batch, list | tuple) and len(batch) == 1:
                yield batch[0], None
            elif isinstance(batch, list | tuple) and len(batch) != 2:
                message = f"{name}: expected batches of inputs and labels; got {len(batch)} parts"
                hint = "use a collate_fn that returns (inputs, labels), or inputs= and labels= of FitPosterior"
                raise UsageError(message, hint=hint)
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
        input_shape: of one example; None where inputs have names.
        states: address and version of each weight, which change with it; compared before `digest`.
    """

    module: nn.Module
    head: Head
    digest: str
    states: list[tuple[int, int]]
    input_shape: tuple[int, ...] | None = None

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
        inputs = next(example.batches(1)).inputs
        shape = None if isinstance(inputs, dict) else tuple(inputs.shape[1:])
        return cls(module, head, _digest_of(module), _states_of(module), shape)

    def run(
        self, batches: Iterable[Batch], name: str, *, is_labeled: bool, task: Task | None = None
    ) -> tuple[Tensor, np.ndarray | None]:
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
            if task is not None:
                task.advance(len(split))
            if is_labeled and batch[1] is not None:
                labels.append(_class_labels(batch[1], name))
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
