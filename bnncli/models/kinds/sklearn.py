"""`sklearn:FILE`: a scikit-learn linear classifier, from its arrays in an npz file or from a skops file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bnncli.data.arrays import npz_names, read_npz
from bnncli.errors import DataError, Untrusted, UsageError
from bnncli.likelihoods import likelihood_of
from bnncli.models import ModelRequest
from bnncli.models.sklearn_arrays import NAMES, arrays_of, read_skops
from bnncli.names import format_names, quote_name
from bnncli.options.command import format_command_line
from bnncli.options.declaration import Form
from bnncli.system.input_files import open_regular


class ScaledLinear(nn.Module):
    """A linear layer on features (n, D) that are first shifted and scaled."""

    shift: Tensor
    scale: Tensor

    def __init__(self, head: nn.Linear, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, K) for inputs (n, D) or (n, ...)."""
        features = inputs.flatten(1)
        if features.shape[1] != self.head.in_features:
            raise DataError(
                f"the classifier expects {self.head.in_features} features, got inputs of shape {tuple(inputs.shape)}",
                code="wrong_inputs", hint="give the features that it was fitted on, such as \0data\0 train=npz:FILE",
            )  # fmt: skip
        logits: Tensor = self.head((features - self.shift) / self.scale)
        return logits


def linear_network(
    coefficients: np.ndarray, intercepts: np.ndarray | None, shift: np.ndarray | None, scale: np.ndarray | None
) -> nn.Module:
    """Build a network from coefficients (K, D), intercepts (K,), and shift and scale of features (D,)."""
    num_outputs, num_features = coefficients.shape
    head = nn.Linear(num_features, num_outputs, bias=intercepts is not None)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(coefficients.astype(np.float32)))
        if intercepts is not None:
            head.bias.copy_(torch.from_numpy(intercepts.astype(np.float32)))
    before = [
        torch.full((num_features,), value) if array is None else torch.from_numpy(array.astype(np.float32))
        for array, value in ((shift, 0.0), (scale, 1.0))
    ]
    return ScaledLinear(head, *before).eval()


FORM = Form("sklearn:FILE", 80, "A scikit-learn linear classifier (npz or skops).")
EXTRA: str | None = None


@dataclass(frozen=True)
class LinearClassifier:
    """Coefficients (K, D), intercepts (K,) or None, and shift and scale of features (D,)."""

    files: tuple[Path, ...]
    coefficients: np.ndarray
    intercepts: np.ndarray | None
    shift: np.ndarray | None
    scale: np.ndarray | None
    classes: tuple[str, ...] | None
    transform: None = None
    task: str | None = None

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network of features (n, D). Raises UsageError if other weights are to be loaded."""

        if state is not None:
            raise UsageError(
                f"{self.files[0]} has its own weights, but CKPT is a different weights file",
                hint="give the classifier's file as CKPT too, or a name for the run",
            )
        return linear_network(self.coefficients, self.intercepts, self.shift, self.scale)


def open_model(place: str, asked: ModelRequest) -> LinearClassifier:
    """Open the classifier in a file.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged, or not a classifier whose probabilities are a softmax or sigmoid of linear scores.
        Untrusted: it refers to types of other libraries, or is a pickle.
    """
    path = Path(place).expanduser()
    with open_regular(path) as stream:
        is_skops = _is_skops(stream.read(4), path)
    found = arrays_of(read_skops(path)) if is_skops else _read_npz(path)
    try:
        return _check_arrays(path, found)
    except DataError as error:
        raise DataError(
            f"{quote_name(path, limit=300)}: {error.message}", hint=error.hint, code=error.code, path=path
        ) from error


def _is_skops(head: bytes, path: Path) -> bool:
    """Return whether a file is a skops file, by its first bytes and members. Raises Untrusted for a pickle."""
    if head[:1] == b"\x80":
        raise Untrusted(
            f"{quote_name(path, limit=300)} is a pickle, which can run code, so it was not loaded", code="needs_code",
            hint="if you trust this file, run: "
                f"{format_command_line('convert', str(path), str(path.with_suffix('.npz')), trust_pickle=True)}",
            path=path,
        )  # fmt: skip
    with open_regular(path) as stream:
        return zipfile.is_zipfile(stream) and "schema.json" in zipfile.ZipFile(stream).namelist()


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file. Raises DataError if coef_ is missing or there are unknown arrays."""
    names = npz_names(path)
    odd = sorted({*names} - {*NAMES})
    if "coef_" not in names or odd:
        what = f"it has {format_names(odd)}" if odd else "it has no coef_"
        message = (
            f"{quote_name(path, limit=300)}: expected the array coef_ and optionally {', '.join(NAMES[1:])}; {what}"
        )
        raise DataError(message, code="bad_arrays", path=path)
    return dict(read_npz(path, names))


def _check_arrays(path: Path, found: Mapping[str, np.ndarray]) -> LinearClassifier:
    """Check the arrays and return their classifier. Raises DataError for mismatched shapes or non-finite values."""
    numbers = {name: np.asarray(found[name]) for name in NAMES if name in found and name != "classes_"}
    for name, array in numbers.items():
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise DataError(f"{name} has values that are not finite numbers", code="not_finite")
    coefficients = np.atleast_2d(numbers["coef_"])
    num_outputs, num_features = coefficients.shape[0], coefficients.shape[-1]
    if coefficients.ndim != 2 or not coefficients.size:
        raise DataError(f"coef_ has shape {coefficients.shape}, expected (K, D)", code="bad_shape")
    sizes = {"intercept_": num_outputs, "mean_": num_features, "scale_": num_features}
    rows = {
        name: np.broadcast_to(numbers[name].reshape(-1), (size,)) if numbers[name].size in (1, size) else None
        for name, size in sizes.items()
        if name in numbers
    }
    for name, row in rows.items():
        if row is None:
            raise DataError(
                f"{name} has shape {numbers[name].shape}, expected ({sizes[name]},) to match coef_ "
                f"{coefficients.shape}",
                code="bad_shape",
            )
    if "scale_" in rows and not np.asarray(rows["scale_"]).all():
        raise DataError("scale_ has zeros, expected nonzero divisors", code="not_finite")
    names = _class_names(found.get("classes_"), num_outputs)
    return LinearClassifier((path,), coefficients, rows.get("intercept_"), rows.get("mean_"), rows.get("scale_"), names)


def _class_names(classes: np.ndarray | None, num_outputs: int) -> tuple[str, ...] | None:
    """Return class names; None if they are 0, 1, 2 and so on. Raises DataError if their number does not fit the outputs."""
    if classes is None:
        return None
    if len(classes) != likelihood_of(num_outputs).num_classes:
        raise DataError(
            f"classes_ has {len(classes)} entries, which does not match the {num_outputs} rows of coef_",
            code="bad_shape",
        )
    is_counted = classes.dtype.kind in "iuf" and bool((classes == np.arange(len(classes))).all())
    return None if is_counted else tuple(str(one) for one in classes.tolist())
