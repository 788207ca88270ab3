"""Arrays of scikit-learn's linear classifiers whose probabilities are a softmax or sigmoid of linear scores."""

from __future__ import annotations

import json
import sys
import tokenize
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bnncli.errors import DataError, Untrusted
from bnncli.models.checkpoint_files import check_members, list_globals, needs_trust, sniff
from bnncli.names import format_names, quote_name
from bnncli.options.command import format_command_line
from bnncli.system.input_files import open_regular

NAMES = ("coef_", "intercept_", "classes_", "mean_", "scale_")  # of the arrays; the first is required
_PROTOCOLS = (0, 1, 2)
_DAMAGE = (
    KeyError, ValueError, TypeError, AttributeError, EOFError, RecursionError, MemoryError, tokenize.TokenError,
    SyntaxError, zipfile.BadZipFile,
)  # fmt: skip
_KNOWN = ("builtins", "numpy", "sklearn", "scipy", "collections")
_NO_LIKELIHOOD = (
    "LinearSVC",
    "SVC",
    "NuSVC",
    "Perceptron",
    "PassiveAggressiveClassifier",
    "RidgeClassifier",
    "RidgeClassifierCV",
)
# For each scaler: the subtracted attribute, the divisor, and the settings that enable them.
_SCALERS = {
    "StandardScaler": ("mean_", "scale_", "with_mean", "with_std"),
    "RobustScaler": ("center_", "scale_", "with_centering", "with_scaling"),
    "MaxAbsScaler": (None, "scale_", None, None),
}


@dataclass(frozen=True)
class Estimator:
    """Class and attributes of an estimator: plain values, arrays, lists and other estimators."""

    name: str
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, model: object) -> Estimator:
        """Convert an object, including nested estimators."""
        own = {name: _convert_estimators(value) for name, value in vars(model).items()}
        return cls(type(model).__name__, own)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)


def _convert_estimators(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_convert_estimators(one) for one in value]
    is_estimator = type(value).__module__.startswith("sklearn.") and hasattr(value, "__dict__")
    return Estimator.of(value) if is_estimator else value


def arrays_of(model: Estimator) -> dict[str, np.ndarray]:
    """Return coefficients (K, D) or, for two classes, (1, D), intercepts, classes, and shift and scale of the inputs.

    Raises:
        DataError: it is not a classifier whose probabilities are a softmax or sigmoid of linear scores; says why.
    """
    model = model.get("best_estimator_") or model
    shift, scale = np.zeros(1), np.ones(1)
    steps = [one[1] for one in model.get("steps")] if model.name == "Pipeline" else [model]
    for step in steps[:-1]:
        if step is not None and step != "passthrough":
            own_shift, own_scale = _read_scaling(step)
            shift, scale = shift + own_shift * scale, scale * own_scale
    found = _coefficients(steps[-1])
    if len(steps) > 1:
        size = found["coef_"].shape[1]
        found |= {"mean_": np.broadcast_to(shift, (size,)).copy(), "scale_": np.broadcast_to(scale, (size,)).copy()}
    return found


def _coefficients(model: Any) -> dict[str, np.ndarray]:
    """Return the arrays of the classifier alone."""
    name = model.name if isinstance(model, Estimator) else type(model).__name__
    is_logistic = name in ("LogisticRegression", "LogisticRegressionCV")
    if name in _NO_LIKELIHOOD or (name == "SGDClassifier" and model.get("loss") not in ("log_loss", "log")):
        loss = f" with loss {model.get('loss')!r}" if name == "SGDClassifier" else ""
        raise _refusal_error(f"a {name}{loss} has no likelihood: its scores are margins, not log probabilities")
    if name == "CalibratedClassifierCV":
        raise _refusal_error(
            f"a {name} averages the probabilities of several calibrated models; expected a single linear layer"
        )
    if not is_logistic and name != "SGDClassifier":
        raise _refusal_error(
            f"expected a LogisticRegression or SGDClassifier, optionally after scalers in a Pipeline; got {name}"
        )
    if "coef_" not in model.attributes:
        raise _refusal_error(f"the {name} is not fitted: it has no coef_")
    classes, coefficients = np.asarray(model.get("classes_")), np.asarray(model.get("coef_"), dtype=float)
    way = model.get("multi_class", "auto")
    if len(classes) > 2 and (name == "SGDClassifier" or way == "ovr" or model.get("solver") == "liblinear"):
        raise _refusal_error(
            f"this {name} trains one classifier for each of {len(classes)} classes (one-vs-rest), so its "
            "probabilities are not a softmax of its scores; fit a LogisticRegression with solver lbfgs"
        )
    if len(coefficients) == 1 and way == "multinomial":  # a softmax of -score and score
        coefficients = 2 * coefficients
    found = {"coef_": coefficients, "classes_": classes}
    if model.get("fit_intercept", True):
        doubled = 2 if len(coefficients) == 1 and way == "multinomial" else 1
        found["intercept_"] = doubled * np.asarray(model.get("intercept_"), dtype=float).reshape(-1)
    return found


def _read_scaling(step: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return what a scaler subtracts and divides by."""
    name = step.name if isinstance(step, Estimator) else type(step).__name__
    if name == "MinMaxScaler" and not step.get("clip"):
        divisor = 1 / np.asarray(step.get("scale_"))
        return -np.asarray(step.get("min_")) * divisor, divisor
    if name not in _SCALERS:
        clips = " that clips" if name == "MinMaxScaler" else ""
        raise _refusal_error(
            f"the step {name}{clips} before the classifier is not supported; expected a scaler that acts on each "
            f"feature separately: {', '.join(_SCALERS)}, MinMaxScaler"
        )
    shift, scale, with_shift, with_scale = _SCALERS[name]
    has_shift = shift is not None and step.get(with_shift) and step.get(shift) is not None
    has_scale = (with_scale is None or step.get(with_scale)) and step.get(scale) is not None
    own_shift = np.asarray(step.get(shift), dtype=float) if has_shift else np.zeros(1)
    own_scale = np.asarray(step.get(scale), dtype=float) if has_scale else np.ones(1)
    return own_shift, own_scale


def _refusal_error(message: str) -> DataError:
    return DataError(message, code="not_the_head")


def read_skops(path: Path) -> Estimator:
    """Read the estimator in a skops file as data: arrays and plain values.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged.
        Untrusted: it refers to types or functions outside scikit-learn, NumPy and SciPy.
    """
    with open_regular(path) as stream:
        try:
            return _read_skops(stream)
        except (DataError, Untrusted) as error:
            raise type(error)(
                f"{quote_name(path, limit=300)}: {error.message}", hint=error.hint, code=error.code, path=path
            ) from error
        except _DAMAGE as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise DataError(
                f"{quote_name(path, limit=300)}: cannot read the skops file ({why})", code="bad_skops", path=path
            ) from error


def _read_skops(stream: IO[bytes]) -> Estimator:
    with zipfile.ZipFile(stream) as archive:
        if "schema.json" not in archive.namelist():
            raise DataError("expected a skops file; it has no schema.json", code="bad_skops")
        schema = json.loads(archive.read("schema.json"))
        if schema.get("protocol", 0) not in _PROTOCOLS:
            raise DataError(
                f"the skops file has protocol {schema['protocol']}, expected one of {_PROTOCOLS}", code="wrong_version"
            )
        odd = sorted({name for name in _types(schema) if name.partition(".")[0] not in _KNOWN})
        if odd:
            raise Untrusted(
                f"it contains types from outside scikit-learn: {format_names(odd, limit=10)}; nothing was loaded", code="needs_code",
                hint="save the arrays coef_, intercept_ and classes_ with numpy.savez, and use that file",
            )  # fmt: skip
        found = _SkopsReader(archive).value(schema)
    if not isinstance(found, Estimator):
        raise DataError(f"expected a scikit-learn classifier, got {type(found).__name__}", code="not_the_head")
    return found


def _types(node: Any) -> Iterator[str]:
    """Yield the full names of all types and functions in a schema."""
    if isinstance(node, dict):
        if "__class__" in node:
            yield f"{node.get('__module__')}.{node['__class__']}"
        for part in node.values():
            yield from _types(part)
    elif isinstance(node, list):
        for part in node:
            yield from _types(part)


class _SkopsReader:
    """Converts schema nodes to values; reads only plain values, arrays and estimators."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        check_members(archive.infolist(), start_dir=archive.start_dir, size=archive.start_dir)
        self._archive, self._known = archive, dict[int, Any]()

    def value(self, node: Mapping[str, Any]) -> Any:
        """Return the value of a node; None for an unsupported kind."""
        if node["__loader__"] == "CachedNode":
            return self._known.get(node["__id__"])
        read = {
            "JsonNode": self._json, "NdArrayNode": self._array, "DictNode": self._mapping, "ListNode": self._list,
            "TupleNode": self._list, "ObjectNode": self._object,
        }.get(node["__loader__"])  # fmt: skip
        found = None if read is None else read(node)
        self._known[node.get("__id__", 0)] = found
        return found

    def _json(self, node: Mapping[str, Any]) -> Any:
        return json.loads(node["content"])

    def _list(self, node: Mapping[str, Any]) -> list[Any]:
        return [self.value(one) for one in node["content"]]

    def _mapping(self, node: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.value(one) for name, one in node["content"].items()}

    def _object(self, node: Mapping[str, Any]) -> Estimator:
        content = self.value(node["content"]) if node.get("content") else {}
        return Estimator(node["__class__"], content if isinstance(content, dict) else {})

    def _array(self, node: Mapping[str, Any]) -> np.ndarray:
        if node["type"] == "numpy":
            with self._archive.open(node["file"]) as stream:
                return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
        items = (
            self.value(node["content"])
            if isinstance(node["content"], dict)
            else [self.value(one) for one in node["content"]]
        )
        return np.array([str(one) for one in items])


def convert_classifier(path: Path, target: Path, *, trust_pickle: bool) -> dict[str, np.ndarray]:
    """Return the arrays of a classifier in a skops file or, with trust_pickle, in a pickle or joblib file, running its code.

    Args:
        target: output path, for messages.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged, or not a classifier whose probabilities are a softmax or sigmoid of linear scores.
        Untrusted: it is a pickle, or refers to types of other libraries.
    """
    with open_regular(path) as stream:
        is_pickle = sniff(stream) == "pickle"
        names = list_globals(stream, "pickle") if is_pickle and not trust_pickle else []
    try:
        if is_pickle and not trust_pickle:
            hint = f"if you trust this file, run: {format_command_line('convert', str(path), str(target), trust_pickle=True)}"
            raise Untrusted(needs_trust(names).message, code="needs_code", hint=hint)
        found = arrays_of(_unpickle(path) if is_pickle else read_skops(path))
    except (DataError, Untrusted) as error:
        shown = quote_name(path, limit=300)
        message = error.message if error.message.startswith(shown) else f"{shown}: {error.message}"
        raise type(error)(message, hint=error.hint, code=error.code, path=path) from error
    return {name: array.astype(str) if array.dtype.kind == "O" else array for name, array in found.items()}


def _unpickle(path: Path) -> Estimator:
    """Load the estimator in a pickle, running its code; joblib reads plain pickles too."""
    import joblib  # a dependency of scikit-learn

    if (folder := str(Path.cwd())) not in sys.path:  # the likely location of the user's classes
        sys.path.insert(0, folder)
    try:
        model: Any = joblib.load(path)
    except Exception as error:  # anything its code raises
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise DataError(
            f"cannot load the pickle: {why}", code="unpicklable",
            hint="the modules that define its classes must be importable; use the scikit-learn version that wrote "
                "the file",
        ) from error  # fmt: skip
    if not hasattr(model, "__dict__"):
        raise DataError(f"expected a scikit-learn classifier, got {type(model).__name__}", code="not_the_head")
    return Estimator.of(model)
