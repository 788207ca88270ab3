"""How far what one command made on two devices lies apart, in the unit that each kind of artifact is judged in.

Where both devices draw the same numbers, differences are of rounding. Trainings and chains draw on the device where they
run: of these the results are compared, by their own standard errors.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import read_posterior
from bnncli.artifacts.predictions import read_predictions
from bnncli.artifacts.samples import SampleFile, read_samples
from bnncli.latent.fit import History
from bnncli.posteriors.gaussian import Gaussian

FEATURES = 1e-5  # of the largest feature
MODE = 1e-3  # posterior standard deviations, of the parameter that is furthest off
SCALE = 1e-5  # of the largest number of scale_tril
COVARIANCE = 2 * SCALE  # of the largest number of a product with the covariance, its square
POINT = 1e-5  # of the largest parameter
PROBABILITIES = 1e-5
SCORES = 1e-6
ECE = 0.02  # an example on the edge of a bin moves it by as much
CHOSEN_PRIOR = 0.05  # of log precision: a search is as exact as that
NATS = 0.5  # of an ELBO: what refine calls no difference that matters
UNTRAINED = 0.2  # of what a training gains, for trainings that end before they stand still
TRAINED = 0.01  # of a bound, beside what repeats scatter by
STANDARD_ERRORS = 5.0
DIAGNOSED = 1e-3  # of a diagnosis's numbers, which are sums of 10,000 nats in float32
TABLE = 1e-4  # of 1 + |number|, in a table of what a network gives from the inputs on
LOOSE_NLL = 5e-3  # nats per example, where each device went its own way from the features on


TRAINED_BY_DRAWS = ("swag", "vi")  # Gaussians whose shuffles and noise are drawn where they run
PAGES = (".html", ".py")  # for people, of numbers that are compared where they are made; no artifacts


class Difference(NamedTuple):
    """How far apart, and how far it may be."""

    what: str
    value: float
    most: float


def differences(reference: Path, made: Path) -> Iterator[Difference]:
    """Those of one artifact, made twice."""
    by_suffix: dict[str, Callable[[Path, Path], Iterator[Difference]]] = {
        ".h5": _of_hdf5, ".nc": _of_samples, ".safetensors": _of_tensors, ".json": _of_metrics, ".csv": _of_tables,
    }  # fmt: skip
    if made.suffix not in PAGES:
        yield from by_suffix[made.suffix](reference, made)


def document_differences(command: str, reference: dict[str, Any], made: dict[str, Any]) -> Iterator[Difference]:
    """Those of what a command prints and does not write."""
    if command == "demo":
        yield from _of_demo(reference, made)
    elif command == "diagnose":
        yield _of_numbers("what it says", reference["posteriors"], made["posteriors"], DIAGNOSED)
    elif command == "integrals":
        own = [{key: value for key, value in document.items() if key != "seconds"} for document in (reference, made)]
        yield _of_numbers("errors", own[0], own[1], PROBABILITIES)


def _of_hdf5(reference: Path, made: Path) -> Iterator[Difference]:
    with h5py.File(made) as file:
        is_prediction = "probs" in file
    if is_prediction:
        one, other = read_predictions(reference), read_predictions(made)
        yield Difference("probabilities", _apart(one.probs, other.probs), PROBABILITIES)
        yield Difference("entropy", _apart(one.entropy, other.entropy), 10 * PROBABILITIES)  # its slope: log p
        return
    first, second = read_features(reference), read_features(made)
    largest = float(np.abs(first.features).max())
    yield Difference("features", _apart(first.features, second.features) / largest, FEATURES)


def _of_samples(reference: Path, made: Path) -> Iterator[Difference]:
    """Means, by their standard errors, and the spread, at the parameter that is furthest off."""
    one, other = read_samples(reference), read_samples(made)
    first, second = (_draws(file) for file in (one, other))
    ess = [max(4.0, _metric(file.header, "min_ess_bulk") or 4.0) for file in (one, other)]
    sd = np.maximum(first.std(axis=0), second.std(axis=0))
    error = sd * math.sqrt(1 / ess[0] + 1 / ess[1])
    yield Difference("means of draws, in standard errors", _worst((first.mean(axis=0) - second.mean(axis=0)) / error),
                     STANDARD_ERRORS)  # fmt: skip
    spread = np.log(first.std(axis=0) / second.std(axis=0)) / math.sqrt(0.5 / ess[0] + 0.5 / ess[1])
    yield Difference("spread of draws, in standard errors", _worst(spread), STANDARD_ERRORS)


def _draws(file: SampleFile) -> np.ndarray:
    """(C T, P) float64."""
    if file.theta is not None:
        return np.asarray(file.theta, np.float64).reshape(-1, file.theta.shape[2])
    weight = np.asarray(file.head_weight, np.float64)
    parts = [weight.reshape(*weight.shape[:2], -1)]
    if file.head_bias is not None:
        parts.append(np.asarray(file.head_bias, np.float64))
    draws = np.concatenate(parts, axis=2)
    return draws.reshape(-1, draws.shape[2])


def _of_tensors(reference: Path, made: Path) -> Iterator[Difference]:
    one, other = read_header(reference), read_header(made)
    if one.kind == "posterior":
        yield from _of_posteriors(reference, made)
    elif one.kind == "decision":
        yield _of_numbers("what was fitted", one.meta["fitted"], other.meta["fitted"], POINT)
    elif one.kind == "export":
        yield _of_numbers("thresholds", one.meta["thresholds"], other.meta["thresholds"], POINT)
    else:  # a trained network: each device went its own way
        losses = [header.meta["metrics"]["loss"] for header in (one, other)]
        yield Difference("loss of the last epoch, nats", abs(losses[0] - losses[1]), LOOSE_NLL)


def _of_tables(reference: Path, made: Path) -> Iterator[Difference]:
    one, other = (list(csv.DictReader(io.StringIO(path.read_bytes().decode()))) for path in (reference, made))
    yield _of_numbers("rows", [_cells(row) for row in one], [_cells(row) for row in other], TABLE)


def _cells(row: dict[str, str]) -> dict[str, str | float]:
    """Real numbers as such, the rest as it is."""
    return {name: float(cell) if "." in cell and cell[:1] in "-0123456789" else cell for name, cell in row.items()}


def _of_posteriors(reference: Path, made: Path) -> Iterator[Difference]:
    (first, header), (second, other) = read_posterior(reference), read_posterior(made)
    kind, method = header.meta["type"], header.meta["method"]
    if method in TRAINED_BY_DRAWS:
        nll = [one.meta["metrics"]["val"][method]["nll"] for one in (header, other)]
        yield Difference("NLL on val, nats per example", abs(nll[0] - nll[1]), LOOSE_NLL)
    elif kind == "gaussian":
        yield from _of_gaussians((first, header), (second, other))
    elif kind == "flow":
        gain = abs(header.meta["metrics"]["elbo_gain"]["value"])
        yield _by_errors("ELBO", _values(header, other, "elbo_after"), slack=NATS + UNTRAINED * gain)
    elif kind == "latent-binary":
        yield _by_errors("bound", _values(header, other, "bound"), slack=NATS)
        yield from _of_trainings(History.from_tensors(first).bound(), History.from_tensors(second).bound())
    else:
        for name in sorted(first):
            largest = max(1e-30, float(first[name].double().abs().max())) if first[name].numel() else 1.0
            yield Difference(name, _apart(first[name], second[name]) / largest, POINT)


def _of_trainings(one: Tensor, other: Tensor) -> Iterator[Difference]:
    """Bounds (E, R) of the last quarter of the epochs, by how they scatter over the repeats, where there are several."""
    if one.shape[1] < 2:
        return
    last = slice(-max(1, len(one) // 4), None)
    means = [bound[last].mean(dim=0) for bound in (one, other)]
    error = math.sqrt(sum(float(mean.var()) / len(mean) for mean in means))
    apart = abs(float(means[0].mean() - means[1].mean()))
    room = TRAINED * abs(float(means[0].mean())) + STANDARD_ERRORS * error
    yield Difference("bound while training, nats", apart, room)


def _of_gaussians(one: tuple[dict[str, Tensor], Header], other: tuple[dict[str, Tensor], Header]) -> Iterator[Difference]:  # fmt: skip
    """Mode and covariance under one prior; the prior itself where each device searched for it."""
    (first, header), (second, its) = one, other
    if header.meta.get("criterion") not in (None, "number"):
        ratio = its.meta["prior_precision"] / header.meta["prior_precision"]
        yield Difference("log of the prior precision that was found", abs(math.log(ratio)), CHOSEN_PRIOR)
        return
    a, b = Gaussian.from_tensors(first, header.meta), Gaussian.from_tensors(second, its.meta)
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(8, a.layout.num_params, generator=generator, dtype=torch.float64)
    sd = a.covariance.unwhiten(torch.randn(256, a.layout.num_params, generator=generator, dtype=torch.float64)).std(0)
    yield Difference("mode, in posterior standard deviations", float(((a.mean - b.mean) / sd).abs().max()), MODE)
    products = [gaussian.covariance.unwhiten(gaussian.covariance.pull_back(probes)) for gaussian in (a, b)]
    name = "cov.scale_tril"
    if name in first and first[name].shape == second[name].shape:
        yield Difference("scale_tril", _apart(first[name], second[name]) / float(first[name].abs().max()), SCALE)
    else:  # other roots are as good: the covariance is one
        yield Difference("covariance", _apart(*products) / float(products[0].abs().max()), COVARIANCE)


def _values(one: Header, other: Header, name: str) -> tuple[dict[str, float], dict[str, float]]:
    return one.meta["metrics"][name], other.meta["metrics"][name]


def _by_errors(what: str, values: tuple[dict[str, float], dict[str, float]], *, slack: float) -> Difference:
    """Two estimates, and the room that their standard errors give them beside the slack."""
    one, other = values
    room = slack + STANDARD_ERRORS * math.hypot(one["standard_error"] or 0.0, other["standard_error"] or 0.0)
    return Difference(f"{what}, nats", abs(one["value"] - other["value"]), room)


def _of_metrics(reference: Path, made: Path) -> Iterator[Difference]:
    rows, others = (read_metrics(path).meta["rows"] for path in (reference, made))
    yield _of_numbers("scores", rows, others, SCORES)


def _of_demo(reference: dict[str, Any], made: dict[str, Any]) -> Iterator[Difference]:
    rows = [{(row["posterior"], row["split"]): row for row in document["rows"]} for document in (reference, made)]
    apart = [abs(_nll(row) - _nll(rows[1][key])) for key, row in rows[0].items()]
    yield Difference("NLL of any posterior, nats per example", max(apart), LOOSE_NLL)


def _nll(row: dict[str, Any]) -> float:
    return float(next(metric["value"] for metric in row["metrics"] if metric["name"] == "nll"))


def _of_numbers(what: str, reference: Any, made: Any, most: float) -> Difference:
    """The largest difference of two documents' numbers, of 1 + |number|; infinite where one says something else."""
    place, value = max(_leaves("", reference, made), key=lambda leaf: _order(leaf[1]), default=("", 0.0))
    return Difference(what if value <= most else f"{what} ({place})", value, most)


def _order(value: float) -> float:
    """By which differences are compared: what is no number comes last."""
    return math.inf if math.isnan(value) else value


def _leaves(place: str, one: Any, other: Any) -> Iterator[tuple[str, float]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(set(one) | set(other)):
            yield from _leaves(f"{place}.{key}", one.get(key), other.get(key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _leaves(f"{place}[{index}]", *pair)
    elif isinstance(one, float) and isinstance(other, float):
        yield place, abs(one - other) / (1 + abs(one)) * (SCORES / ECE if place.endswith(".ece") else 1)
    elif one != other and not _is_told(place):
        yield f"{place}: {str(one)[:60]!r}, {str(other)[:60]!r}", math.inf


def _is_told(place: str) -> bool:
    """Whether it is a sentence, whose numbers stand elsewhere too."""
    return place.rsplit(".", 1)[-1].split("[")[0] in (
        "device",
        "seconds",
        "doubts",
        "reason",
        "content_digest",
        "verdict",
        "judged",  # by digest
    )


def _metric(header: Header | None, name: str) -> float | None:
    assert header is not None
    value = header.meta["metrics"].get(name)
    return None if value is None else float(value)


def _apart(one: Any, other: Any) -> float:
    """The largest difference; infinite where shapes differ."""
    first, second = (np.asarray(part, np.float64) for part in (one, other))
    if first.shape != second.shape:
        return math.inf
    return _worst(first - second)


def _worst(values: np.ndarray) -> float:
    """The largest magnitude; NaN where there is one."""
    return float(np.abs(values).max()) if values.size else 0.0
