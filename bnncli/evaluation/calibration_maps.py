"""Calibration maps: functions from a classifier's logits to better calibrated ones, fitted to labels.

`MAPS` is the table, one class a map. A map takes class logits (N, C) and returns class logits (N, C), whose softmax, or
sigmoid where each class is a label by itself, gives the probabilities. It is a list of steps: functions of named tensors,
which predictions run in float64 and which exported files contain as they are.

`platt`, `beta`, `isotonic` and `histogram` map the log odds of one label. Of two exclusive classes they map the odds of
the second; of more, those of each class against all others, and the softmax divides the results by their sum. Fits use
float64 and log space. Those with a minimum that separable data push to infinity have a weak Gaussian prior around the
identity.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from bnncli.errors import NumericError
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.temperature import LabelledLogits, fit_temperature
from bnncli.lazy import np, special, torch
from bnncli.likelihoods import Likelihood
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Values: TypeAlias = "dict[str, Tensor]"
Step = Callable[[Values], Values]

NUM_BINS = 15  # of the histogram, as in the expected calibration error
DECADES = (4, 3, 2, 1, 0, -1, -2)  # of prior precisions, strongest first
FALLS = 2  # the search ends after the out-of-fold NLL has risen this often in a row
WEAK = 1e-3  # prior precision of parameters that are not regularised
BIAS = 0.1  # and of the biases of a matrix
MOST_WORK = 5e6  # examples times parameters of a map that is tried by default
_RESOLUTION = 64  # distinct log odds in a unit, for isotonic: 1/64 changes a probability by at most 0.004
_MOST_STEPS, _GRADIENT = 2000, 1e-5
_MOST_NEWTON = 600  # parameters: a Hessian takes N P^2
_AT_ONCE = 2**22  # numbers of a block of columns


# Steps. Their source goes into exported files, so each calls nothing but methods of tensors.


def scaled_logits(v: Values) -> Values:
    """Return logits times a scale, (1,) or of each class."""
    return {"logits": v["logits"] * v["map_weight"]}


def shifted_logits(v: Values) -> Values:
    """Return logits times a scale for each class, plus a bias (C,): vector scaling, Guo et al. (2017)."""
    return {"logits": v["logits"] * v["map_weight"] + v["map_bias"]}


def mixed_logits(v: Values) -> Values:
    """Return a matrix (C, C) times the logits, plus a bias (C,): matrix scaling, Guo et al. (2017)."""
    return {"logits": v["logits"] @ v["map_weight"].T + v["map_bias"]}


def mixed_log_probs(v: Values) -> Values:
    """Return a matrix (C, C) times the log probabilities, plus a bias (C,): Dirichlet calibration, Kull et al. (2019)."""
    return {"logits": v["logits"].log_softmax(1) @ v["map_weight"].T + v["map_bias"]}


def label_odds(v: Values) -> Values:
    """Return the log odds (B, C) of labels that do not exclude each other: their logits."""
    return {"odds": v["logits"] * 1}


def odds_of_two(v: Values) -> Values:
    """Return the log odds (B, 1) of the second of two classes."""
    return {"odds": v["logits"][:, 1:] - v["logits"][:, :1]}


def odds_against_rest(v: Values) -> Values:
    """Return the log odds (B, C) of each class against all others, with all digits."""
    logits = v["logits"]
    total = logits.logsumexp(1, keepdim=True)
    best = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, best, -1e30).logsumexp(1, keepdim=True)  # of the most probable class
    rest = total + (-(logits - total).exp().clamp_max(0.5)).log1p()
    return {"odds": logits - rest.scatter(1, best, others)}


def shifted_odds(v: Values) -> Values:
    """Return odds times a scale plus a bias: Platt (1999)."""
    return {"odds": v["odds"] * v["map_weight"] + v["map_bias"]}


def beta_odds(v: Values) -> Values:
    """Return a ln p - b ln(1 - p) + c: Kull, Silva Filho and Flach (2017)."""
    small = (-v["odds"].abs()).exp().log1p()
    log_p, log_absent = v["odds"].clamp_max(0) - small, (-v["odds"]).clamp_max(0) - small
    return {"odds": v["map_present"] * log_p - v["map_absent"] * log_absent + v["map_bias"]}


def interpolated_odds(v: Values) -> Values:
    """Return the log odds of a piecewise linear, increasing function (C, M segments) of the log odds."""
    shares = ((v["odds"].unsqueeze(2) - v["map_start"]) / v["map_width"]).clamp(0, 1)
    probs = (v["map_base"] + (shares * v["map_rise"]).sum(2)).clamp(1e-7, 1 - 1e-7)
    return {"odds": probs.log() - (-probs).log1p()}


def binned_odds(v: Values) -> Values:
    """Return the log odds of the bin (C, M + 1) that the log odds are in: Zadrozny and Elkan (2001)."""
    is_above = v["odds"].unsqueeze(2) >= v["map_edges"]
    probs = (v["map_base"] + (is_above * v["map_rise"]).sum(2)).clamp(1e-7, 1 - 1e-7)
    return {"odds": probs.log() - (-probs).log1p()}


def logits_of_labels(v: Values) -> Values:
    """Return the log odds, whose sigmoid gives the probability of each label."""
    return {"logits": v["odds"] * 1}


def logits_of_two(v: Values) -> Values:
    """Return logits (B, 2) that differ by the log odds."""
    return {"logits": v["odds"] * v["map_sides"]}


def logits_of_rest(v: Values) -> Values:
    """Return the log probability of each class against all others, whose softmax divides by their sum."""
    return {"logits": v["odds"].clamp_max(0) - (-v["odds"].abs()).exp().log1p()}


@dataclass(frozen=True)
class CalibrationData:
    """Class logits and labels, on the CPU.

    Attributes:
        logits: (N, C) float64.
        labels: (N,) int64, or zeros and ones (N, C) of labels that do not exclude each other.
        groups: groups of dependent rows, or None.
    """

    logits: NDArray[np.float64]
    labels: NDArray[np.int64]
    likelihood: Likelihood
    groups: RowGroups | None = None

    @classmethod
    def of(cls, data: LabelledLogits, *, groups: RowGroups | None = None) -> CalibrationData:
        """Return the class logits of a network's outputs."""
        likelihood = data.likelihood
        logits = likelihood.balanced_class_logits(data.logits.double(), dim=1).cpu().numpy()
        return cls(logits, data.labels.long().cpu().numpy(), class_likelihood(likelihood), groups)

    def take(self, rows: NDArray) -> CalibrationData:
        """Return some rows."""
        return CalibrationData(self.logits[rows], self.labels[rows], self.likelihood)

    @property
    def labelled(self) -> LabelledLogits:
        """Return the same for temperature scaling."""
        return LabelledLogits(torch.from_numpy(self.logits), torch.from_numpy(self.labels), self.likelihood)

    @cached_property
    def targets(self) -> NDArray[np.float64]:
        """Return zeros and ones (N, C)."""
        if not self.likelihood.is_exclusive:
            return self.labels.astype(np.float64)
        return np.eye(self.likelihood.num_classes)[self.labels]

    @cached_property
    def inverse_temperature(self) -> float:
        """Return one over the best temperature; 1 for separable data, of which any lower one would be better."""
        found = fit_temperature(self.labelled)
        return 1.0 if found.unbounded == "separable" else 1 / found.temperature

    @cached_property
    def odds(self) -> NDArray[np.float64]:
        """Return log odds (N, J) of the labels that are mapped."""
        return np.asarray(_odds_step(self.likelihood)({"logits": torch.from_numpy(self.logits)})["odds"].numpy())

    @cached_property
    def presence(self) -> NDArray[np.float64]:
        """Return zeros and ones (N, J), which the odds are of."""
        return self.targets[:, 1:] if _is_of_two(self.likelihood) else self.targets

    def losses(self, logits: NDArray) -> NDArray[np.float64]:
        """Return -log p (N,) of the labels under class logits (N, C); of labels, their mean."""
        found: NDArray = self.likelihood.losses(torch.from_numpy(logits), torch.from_numpy(self.labels), 1.0).numpy()
        return found


def class_likelihood(likelihood: Likelihood) -> Likelihood:
    """Return the likelihood of class logits (N, C) in place of outputs (N, K)."""
    from bnncli.likelihoods import likelihood_of

    return likelihood_of(likelihood.num_classes, likelihood.name)


def _is_of_two(likelihood: Likelihood) -> bool:
    return likelihood.is_exclusive and likelihood.num_classes == 2


def _odds_step(likelihood: Likelihood) -> Step:
    if not likelihood.is_exclusive:
        return label_odds
    return odds_of_two if likelihood.num_classes == 2 else odds_against_rest


@dataclass(frozen=True)
class CalibrationMap(ABC):
    """A function of class logits.

    Attributes:
        name: in the table.
        words: for people.
        is_regularised: whether a prior precision is chosen by cross-validation.
        takes_labels: whether it maps labels that do not exclude each other.
        tensors: by the names that the steps use, float64.
        likelihood: of the class logits (N, C).
    """

    name: ClassVar[str]
    words: ClassVar[str]
    is_regularised: ClassVar[bool] = False
    takes_labels: ClassVar[bool] = True
    tensors: Mapping[str, Tensor]
    likelihood: Likelihood

    @classmethod
    @abstractmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map with the lowest penalised NLL.

        Args:
            precision: of the prior, where the map is regularised.
            near: the map of another precision, to start from.

        Raises:
            NumericError: the fit did not converge.
        """

    @classmethod
    def count_params(cls, num_classes: int) -> int:
        """Return about how many numbers are fitted for C classes."""
        return 3 * num_classes

    @property
    @abstractmethod
    def steps(self) -> tuple[Step, ...]:
        """Return the steps from `logits` to `logits`."""

    def class_logits(self, logits: Tensor) -> Tensor:
        """Return calibrated class logits (n, C) float64 for class logits (n, C)."""
        tensors = {name: one.to(logits.device) for name, one in self.tensors.items()}
        width = tensors["map_rise"].shape[1] if "map_rise" in tensors else 1  # numbers computed from one
        found = []
        for block in logits.split(max(1, _AT_ONCE // (width * logits.shape[1]))):
            values = {"logits": block.double(), **tensors}
            for step in self.steps:
                values.update(step(values))
            found.append(values["logits"])
        return torch.cat(found)

    def to(self, device: torch.device | str) -> CalibrationMap:
        """Return a copy on another device."""
        return replace(self, tensors={name: one.to(device) for name, one in self.tensors.items()})

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return log probabilities (n, C) float64 for class logits (n, C)."""
        return self.likelihood.log_class_probabilities(self.class_logits(logits), dim=1)

    def probs(self, logits: Tensor) -> Tensor:
        """Return probabilities (n, C) float64 for class logits (n, C)."""
        return self.likelihood.class_probabilities(self.class_logits(logits), dim=1)


class OddsMap(CalibrationMap):
    """A map of the log odds of each label, whatever the others."""

    odds_step: ClassVar[staticmethod[[Values], Values]]

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the steps to the odds, the map, and the steps back."""
        own = type(self).odds_step
        if not self.likelihood.is_exclusive:
            return label_odds, own, logits_of_labels
        return (
            (odds_of_two, own, logits_of_two)
            if _is_of_two(self.likelihood)
            else (odds_against_rest, own, logits_of_rest)
        )

    @classmethod
    def _of(cls, data: CalibrationData, **arrays: NDArray) -> CalibrationMap:
        tensors = {f"map_{name}": torch.from_numpy(array.copy()) for name, array in arrays.items()}
        if _is_of_two(data.likelihood):
            tensors["map_sides"] = torch.tensor([-0.5, 0.5], dtype=torch.float64)
        return cls(tensors, data.likelihood)


class Temperature(CalibrationMap):
    """One number divides all logits."""

    name = "temperature"
    words = "one number divides all logits"

    @classmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map."""
        return cls({"map_weight": torch.tensor([data.inverse_temperature], dtype=torch.float64)}, data.likelihood)

    @classmethod
    def count_params(cls, num_classes: int) -> int:
        """Return 1."""
        return 1

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the scale."""
        return (scaled_logits,)


class Vector(CalibrationMap):
    """One scale and one bias for each class, drawn towards one temperature."""

    name = "vector"
    words = "one scale and one bias for each class"
    is_regularised = True

    @classmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map; the prior has its mean at the best temperature without biases."""
        size, center = data.logits.shape[1], np.array([data.inverse_temperature, 0.0])
        if data.likelihood.is_exclusive:
            mean = np.tile(center, (size, 1))
            weight, bias = _fit_linear(data, data.logits, mean, np.full_like(mean, precision), near)
        else:
            found = _fit_columns(_with_ones, data.logits, data.targets, center, precision=precision)
            weight, bias = (torch.from_numpy(found[:, place].copy()) for place in (0, 1))
        return cls({"map_weight": weight, "map_bias": bias}, data.likelihood)

    @classmethod
    def count_params(cls, num_classes: int) -> int:
        """Return 2 C."""
        return 2 * num_classes

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the scales and biases."""
        return (shifted_logits,)


class Matrix(CalibrationMap):
    """A matrix and a bias, with off-diagonal and intercept regularisation (ODIR) of Kull et al. (2019)."""

    name = "matrix"
    words = "a matrix and a bias, of the logits"
    is_regularised = True
    takes_labels = False

    @classmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map; off-diagonal entries have a prior with the mean 0 and this precision."""
        inputs = cls.inputs(data)
        diagonal = np.eye(inputs.shape[1], inputs.shape[1] + 1)
        precisions = np.where(diagonal > 0, WEAK, precision)
        precisions[:, -1] = BIAS
        weight, bias = _fit_linear(data, inputs, diagonal * data.inverse_temperature, precisions, near)
        return cls({"map_weight": weight, "map_bias": bias}, data.likelihood)

    @classmethod
    def inputs(cls, data: CalibrationData) -> NDArray[np.float64]:
        """Return what the matrix multiplies, (N, C)."""
        return data.logits

    @classmethod
    def count_params(cls, num_classes: int) -> int:
        """Return C (C + 1)."""
        return num_classes * (num_classes + 1)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the matrix and bias."""
        return (mixed_logits,)


class Dirichlet(Matrix):
    """A matrix and a bias of the log probabilities, with the same regularisation."""

    name = "dirichlet"
    words = "a matrix and a bias, of the log probabilities"

    @classmethod
    def inputs(cls, data: CalibrationData) -> NDArray[np.float64]:
        """Return log probabilities."""
        found: NDArray = special.log_softmax(data.logits, axis=1)
        return found

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the matrix and bias."""
        return (mixed_log_probs,)


class Platt(OddsMap):
    """A sigmoid of the log odds of each class, fitted to Platt's smoothed targets."""

    name = "platt"
    words = "a sigmoid of each class's log odds"
    odds_step = staticmethod(shifted_odds)

    @classmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map."""
        present = data.presence.sum(axis=0)
        smoothed = np.where(data.presence > 0, (present + 1) / (present + 2), 1 / (len(data.presence) - present + 2))
        found = _fit_columns(_with_ones, data.odds, smoothed, np.array([1.0, 0.0]))
        return cls._of(data, weight=found[:, 0], bias=found[:, 1])


class Beta(OddsMap):
    """A logistic function of ln p and -ln(1 - p) of each class, both with coefficients of at least 0."""

    name = "beta"
    words = "a ratio of beta densities of each class's probability"
    odds_step = staticmethod(beta_odds)

    @classmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map; a negative coefficient is set to 0 and the others are fitted again."""

        def features(odds: NDArray) -> NDArray:
            return np.stack([special.log_expit(odds), -special.log_expit(-odds), np.ones_like(odds)], axis=2)

        kept = np.ones((data.odds.shape[1], 3), dtype=bool)
        while True:
            found = _fit_columns(features, data.odds, data.presence, np.array([1.0, 1.0, 0.0]), kept=kept)
            negative = found[:, :2] < 0
            negative[:, 1] &= ~negative[:, 0]  # one at a time
            if not negative.any():
                return cls._of(data, present=found[:, 0], absent=found[:, 1], bias=found[:, 2])
            kept[:, :2] &= ~negative


class Isotonic(OddsMap):
    """The increasing function of each class's probability with the least squared error, linear between its steps.

    Zadrozny and Elkan (2002). The two ends count one example more of either kind, so that no probability is 0 or 1.
    """

    name = "isotonic"
    words = "an increasing function of each class's probability"
    odds_step = staticmethod(interpolated_odds)

    @classmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map."""
        columns = [_fit_increasing(odds, found) for odds, found in zip(data.odds.T, data.presence.T, strict=True)]
        most = max(1, *(len(start) for _, start, _, _ in columns))
        base = np.array([value for value, _, _, _ in columns])
        start, width, rise = np.zeros((len(base), most)), np.ones((len(base), most)), np.zeros((len(base), most))
        for place, (_, *segments) in enumerate(columns):
            for array, segment in zip((start, width, rise), segments, strict=True):
                array[place, : len(segment)] = segment
        return cls._of(data, base=base, start=start, width=width, rise=rise)


class Histogram(OddsMap):
    """The share of each class in bins of equal width, with one example more at the middle of each."""

    name = "histogram"
    words = f"the share of each class in {NUM_BINS} bins of its probability"
    odds_step = staticmethod(binned_odds)

    @classmethod
    def fit(cls, data: CalibrationData, precision: float, near: CalibrationMap | None) -> CalibrationMap:
        """Return the map."""
        edges = special.logit(np.arange(1, NUM_BINS) / NUM_BINS)
        size = data.odds.shape[1]
        places = (np.searchsorted(edges, data.odds, side="right") + NUM_BINS * np.arange(size)).ravel()
        count, total = (
            np.bincount(places, weights, NUM_BINS * size).reshape(size, NUM_BINS)
            for weights in (np.ones(data.odds.size), data.presence.ravel())
        )
        shares = (total + (np.arange(NUM_BINS) + 0.5) / NUM_BINS) / (count + 1)
        return cls._of(data, base=shares[:, 0], edges=edges, rise=np.diff(shares, axis=1))


MAPS: Mapping[str, type[CalibrationMap]] = {
    one.name: one for one in (Temperature, Vector, Matrix, Dirichlet, Platt, Beta, Isotonic, Histogram)
}


def open_map(name: str, tensors: Mapping[str, Tensor], likelihood: Likelihood) -> CalibrationMap:
    """Return a stored map.

    Args:
        tensors: with further ones that are not of the map.
        likelihood: of the outputs.

    Raises:
        ValueError: there is no such map.
    """
    if name not in MAPS:
        raise ValueError(f"expected a map of {', '.join(MAPS)}, got {name!r}")
    own = {key: one.double() for key, one in tensors.items() if key.startswith("map_")}
    return MAPS[name](own, class_likelihood(likelihood))


@dataclass(frozen=True)
class FittedMap:
    """A map fitted to all rows, and to the rows that each fold keeps.

    Attributes:
        precision: of the prior, chosen by the out-of-fold NLL; None where there is none.
        logits: (N, C) float64, out of fold.
        losses: (N,) float64, nats, out of fold.
    """

    whole: CalibrationMap
    folds: Sequence[CalibrationMap]
    precision: float | None
    logits: NDArray[np.float64]
    losses: NDArray[np.float64]

    @property
    def name(self) -> str:
        """Name of the map."""
        return self.whole.name

    @property
    def nll(self) -> float:
        """Mean loss out of fold, nats."""
        return float(self.losses.mean())


def fit_map(name: str, data: CalibrationData, folds: NDArray, *, progress: Progress = SILENT) -> FittedMap:
    """Fit a map, and its versions without each fold; choose the prior precision by the out-of-fold NLL.

    Args:
        folds: (N,), the fold that leaves out each row.

    Raises:
        NumericError: a fit did not converge.
    """
    kind, numbers = MAPS[name], range(int(folds.max(initial=0)) + 1)
    parts = [(data.take(folds != number), np.flatnonzero(folds == number)) for number in numbers]
    precisions = [10.0**decade for decade in DECADES] if kind.is_regularised else [0.0]
    task = progress.task(f"fit {name}", len(precisions) * len(parts) + 1)
    near: list[CalibrationMap | None] = [None] * len(parts)
    best: FittedMap | None = None
    rises, last = 0, math.inf
    for precision in precisions:
        logits = np.empty_like(data.logits)
        for number, (kept, left_out) in enumerate(parts):
            near[number] = found = kind.fit(kept, precision, near[number])
            logits[left_out] = found.class_logits(torch.from_numpy(data.logits[left_out])).numpy()
            task.advance()
        made: list[Any] = [*near]
        tried = FittedMap(made[0], made, precision if kind.is_regularised else None, logits, data.losses(logits))
        best = tried if best is None or tried.nll < best.nll else best
        rises, last = rises + 1 if tried.nll > last else 0, tried.nll
        if rises == FALLS:
            break
    assert best is not None
    whole = kind.fit(data, best.precision or 0.0, best.folds[0] if kind.is_regularised else None)
    return FittedMap(whole, best.folds, best.precision, best.logits, best.losses)


def is_tried(name: str, num_examples: int, likelihood: Likelihood) -> bool:
    """Return whether a map is tried by default: it takes the labels, and its fit at most about a minute; temperature always."""
    kind = MAPS[name]
    if kind is Temperature:
        return True
    fits = kind.takes_labels or likelihood.is_exclusive
    return fits and num_examples * kind.count_params(likelihood.num_classes) <= MOST_WORK


def choose_map(fitted: Sequence[FittedMap], *, groups: RowGroups | None = None) -> tuple[FittedMap, str]:
    """Return the map with the lowest out-of-fold NLL if it beats temperature by more than the paired standard error, else temperature; and why.

    Args:
        fitted: temperature and others.
        groups: groups of dependent rows, or None.
    """
    plain = next(one for one in fitted if one.name == Temperature.name)
    best = min(fitted, key=lambda one: one.nll)
    gain, error = paired_gain(plain.losses, best.losses, groups)
    if best is plain or not gain > error:
        return plain, "no other map has a lower out-of-fold NLL by more than its standard error"
    return best, f"its out-of-fold NLL is lower than that of one temperature by {gain:.4f} +- {error:.4f}"


def paired_gain(plain: NDArray, losses: NDArray, groups: RowGroups | None = None) -> tuple[float, float]:
    """Return the mean of losses (N,) of temperature minus those of a map, and its standard error; infinite for one example or group."""
    gap = np.asarray(plain) - np.asarray(losses)
    gap = gap if groups is None else groups.linearized(gap)
    return float(gap.mean()), float(gap.std(ddof=1)) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf


def _fit_linear(
    data: CalibrationData, inputs: NDArray, mean: NDArray, precision: NDArray, near: CalibrationMap | None
) -> tuple[Tensor, Tensor]:
    """Return weight (C, C), or a diagonal (C,), and bias (C,) of new logits of exclusive classes, from `near` or the prior's mean.

    Newton's method in a trust region, or L-BFGS where there are too many parameters.

    Args:
        inputs: (N, C), which the weight multiplies.
        mean, precision: (C, J) of a Gaussian prior of each class's weights and, last, its bias.

    Raises:
        NumericError: the gradient of the mean NLL does not become small.
    """
    from scipy.optimize import minimize

    (size, width), num_rows = mean.shape, len(inputs)
    is_diagonal = width == 2 and size != 1
    unit = np.ones(width)
    unit[:-1] = max(1e-12, float(np.sqrt(np.square(inputs).mean())))  # of the inputs, so that all gradients are alike
    scaled, mean, precision = inputs / unit[0], mean * unit, precision / unit**2

    def logits_at(theta: NDArray) -> NDArray:
        product = scaled * theta[:, 0] if is_diagonal else scaled @ theta[:, :-1].T
        return np.asarray(product + theta[:, -1])

    def objective(flat: NDArray) -> tuple[float, NDArray]:
        theta = flat.reshape(mean.shape)
        logits = logits_at(theta)
        logits -= logits.max(axis=1, keepdims=True)
        probs = np.exp(logits)
        sums = probs.sum(axis=1, keepdims=True)
        slope, off = probs / sums - data.targets, theta - mean
        total = float(np.log(sums).sum() - np.vdot(logits, data.targets) + (precision * off**2).sum() / 2)
        by_weight = (slope * scaled).sum(axis=0)[:, None] if is_diagonal else slope.T @ scaled
        gradient = np.concatenate([by_weight, slope.sum(axis=0)[:, None]], axis=1) + precision * off
        return total / num_rows, gradient.ravel() / num_rows

    def hessian(flat: NDArray) -> NDArray:
        probs = special.softmax(logits_at(flat.reshape(mean.shape)), axis=1)
        found = np.diag(precision.ravel())
        step = max(1, _AT_ONCE // found.shape[0])
        for rows in (slice(start, start + step) for start in range(0, num_rows, step)):
            own, part = probs[rows], scaled[rows]
            ones = np.ones((len(part), size if is_diagonal else 1, 1))
            features = np.concatenate([part[:, :, None] if is_diagonal else part[:, None, :], ones], axis=2)
            weighted = own[:, :, None] * features
            within = np.einsum("ncj,ncl->cjl", weighted, np.broadcast_to(features, weighted.shape), optimize=True)
            flat_rows = weighted.reshape(len(part), -1)
            found -= flat_rows.T @ flat_rows
            for place, block in enumerate(within):
                found[place * width : (place + 1) * width, place * width : (place + 1) * width] += block
        return found / num_rows

    start = mean
    if near is not None:
        weight, bias = near.tensors["map_weight"].numpy(), near.tensors["map_bias"].numpy()
        start = np.concatenate([weight.reshape(size, -1), bias[:, None]], axis=1) * unit
    if mean.size <= _MOST_NEWTON:
        how: dict[str, Any] = {"method": "trust-exact", "hess": hessian, "options": {"gtol": _GRADIENT / 100}}
    else:
        most = {"maxiter": _MOST_STEPS, "maxfun": 2 * _MOST_STEPS, "maxcor": 20, "ftol": 0.0, "gtol": _GRADIENT / 10}
        how = {"method": "L-BFGS-B", "options": most}
    found = minimize(objective, start.ravel(), jac=True, **how)
    if not float(np.abs(objective(found.x)[1]).max()) <= _GRADIENT:
        raise _not_converged()
    theta = torch.from_numpy(found.x.reshape(mean.shape) / unit)
    return theta[:, :-1].squeeze(1).contiguous(), theta[:, -1].contiguous()


def _not_converged() -> NumericError:
    return NumericError(
        "the fit of the calibration map did not converge",
        hint="the logits are not finite, or extremely large; use another map, such as temperature",
        code="not_converged",
    )


def _with_ones(odds: NDArray) -> NDArray:
    return np.stack([odds, np.ones_like(odds)], axis=2)


def _fit_columns(
    features: Callable[[NDArray], NDArray],
    odds: NDArray,
    targets: NDArray,
    mean: NDArray,
    *,
    precision: float = WEAK,
    kept: NDArray | None = None,
) -> NDArray[np.float64]:
    """Return the coefficients (J, P) of a logistic regression of each column of targets (N, J), in blocks of columns."""
    size = max(1, _AT_ONCE // max(1, len(mean) * len(odds)))
    found = []
    for start in range(0, odds.shape[1], size):
        own = slice(start, start + size)
        block = features(odds[:, own]).transpose(1, 0, 2)
        mask = np.ones((block.shape[0], len(mean)), dtype=bool) if kept is None else kept[own]
        found.append(_fit_logistic(block, targets[:, own].T, mean, precision, mask))
    return np.concatenate(found)


def _fit_logistic(
    features: NDArray, targets: NDArray, mean: NDArray, precision: float, kept: NDArray
) -> NDArray[np.float64]:
    """Return coefficients (J, P) by Newton's method, with halved steps where the objective would rise.

    Args:
        features: (J, N, P). targets: (J, N), from 0 to 1.
        mean, precision: (P,) and of all, of a Gaussian prior.
        kept: (J, P), which coefficients are fitted; the others are 0.

    Raises:
        NumericError: it did not converge.
    """
    features = features * kept[:, None, :]
    mean = np.where(kept, mean, 0.0)
    theta = mean.copy()

    def objective(theta: NDArray) -> NDArray:
        logits = np.einsum("jnp,jp->jn", features, theta)
        losses = np.logaddexp(0, logits) - targets * logits
        return np.asarray(losses.sum(axis=1) + precision / 2 * np.square(theta - mean).sum(axis=1))

    value = objective(theta)
    for _ in range(_MOST_STEPS):
        probs = special.expit(np.einsum("jnp,jp->jn", features, theta))
        gradient = np.einsum("jnp,jn->jp", features, probs - targets) + precision * (theta - mean)
        hessian = np.einsum("jnp,jn,jnq->jpq", features, probs * (1 - probs), features, optimize=True)
        step = np.linalg.solve(hessian + precision * np.eye(theta.shape[1]), gradient[:, :, None])[:, :, 0]
        decrement = (gradient * step).sum(axis=1)
        if not np.isfinite(decrement).all():
            break
        size = np.ones(len(theta))
        for _ in range(60):
            tried = objective(theta - size[:, None] * step)
            is_higher = ~(tried <= value - 1e-4 * size * decrement + 1e-12 * np.abs(value))
            if not is_higher.any():
                break
            size[is_higher] /= 2
        else:
            size[is_higher] = 0.0
        theta = theta - size[:, None] * step
        value = objective(theta)
        if decrement.max(initial=0) <= 1e-10:  # nats of all rows
            return theta
    raise _not_converged()


def _fit_increasing(odds: NDArray, presence: NDArray) -> tuple[float, NDArray, NDArray, NDArray]:
    """Return the lowest value of an isotonic regression, and start, width and rise of the segments between its steps."""
    from scipy.optimize import isotonic_regression

    places, row = np.unique(np.round(odds * _RESOLUTION) / _RESOLUTION, return_inverse=True)
    count = np.bincount(row).astype(np.float64)
    found = isotonic_regression(np.bincount(row, presence) / count, weights=count)
    begins, ends = found.blocks[:-1], found.blocks[1:] - 1
    values, sizes = found.x[begins], np.add.reduceat(count, begins)
    if values[0] <= 0:
        values[0] = min(1 / (sizes[0] + 2), *(values[1:2] if len(values) > 1 else [1.0]))
    if values[-1] >= 1:
        values[-1] = max(1 - 1 / (sizes[-1] + 2), *(values[-2:-1] if len(values) > 1 else [0.0]))
    start = places[ends[:-1]]
    return float(values[0]), start, places[begins[1:]] - start, np.diff(values)
