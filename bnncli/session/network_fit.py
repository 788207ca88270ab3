"""Check that a network was read correctly: its fit to the labels, and inputs unlike those it was extracted with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.features import FeatureFile, label_counts
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.errors import CheckFailed, DataError
from bnncli.lazy import special, torch
from bnncli.likelihoods import Likelihood, likelihood_of
from bnncli.names import count_noun, percent, quote_name
from bnncli.progress import Progress
from bnncli.session.run import Run

_FACTOR, _OOD_FACTOR = 10.0, 50.0  # ratios of mean absolute value and of deviation that count as another scale
_FEW_ROWS = 16  # an image in a smaller sample may be all white or all black
_MUCH_NEGATIVE = 0.2
_SHIFT, _LARGE_SHIFT, _SPREAD = 0.5, 3.0, 1.9  # shift of the mean in deviations; ratio of deviations
_INVERTED, _NEAR, _ALIKE = 1.0, 0.25, 1.25  # shift of the mean, distance from its mirror image; ratio of deviations
_SIDE = 1.5  # ratio of heights or widths of images
_FEW_TOKENS, _COVERED, _ONE_TOKEN, _TIMES_AS_LARGE = 200, 4.0, 0.25, 20.0


def read_input_statistics(header: Header) -> Mapping[str, Any] | None:
    """Return a split's recorded input statistics; None for features of earlier versions and ready-made features."""
    record = header.provenance.get("input_statistics")
    if record is None:
        return None
    with convert_lookup_errors(header.path):
        difference("", record, "", record, is_scale_alone=False)  # reads every field
    return dict(record)


def reference_of(run: Run) -> tuple[str, Mapping[str, Any]] | None:
    """Return the reference split (train, or the first that is not OOD) and its input statistics."""
    for name in run.folder.splits():
        with suppress(DataError):  # a damaged split does not block the others
            header = read_header(run.folder.features(name))
            if not _is_lenient(header) and (found := read_input_statistics(header)) is not None:
                return name, found
    return None


def describe_input_differences(run: Run, names: Iterable[str]) -> list[str]:
    """Return a description of how each split's inputs differ from the reference's, for splits that differ."""
    reference = reference_of(run)
    found = []
    for name in names:
        header = read_header(run.folder.features(name))
        statistics = read_input_statistics(header)
        if reference is not None and statistics is not None and name != reference[0]:
            found.append(difference(name, statistics, *reference, is_scale_alone=_is_lenient(header)))
    return [text for text in found if text is not None]


def difference(
    name: str, found: Mapping[str, Any], reference: str, known: Mapping[str, Any], *, is_scale_alone: bool
) -> str | None:
    """Return how inputs differ from a reference, in words; None if they are alike.

    Args:
        name, reference: of the two splits. found, known: their statistics, see `InputSums.statistics`.
        is_scale_alone: whether only a difference in scale (such as 255) counts, as for OOD data and corrupted copies.
    """
    if "tokens" in found and "tokens" in known:
        return None if is_scale_alone else _compare_tokens(name, found["tokens"], reference, known["tokens"])
    if "mean" not in found or "mean" not in known:
        return None
    what = _compare_numbers(found, reference, known, is_scale_alone=is_scale_alone)
    return None if what is None else f"{name}: {what}: {_numbers(found)} ({reference}: {_numbers(known)})"


def _compare_numbers(
    found: Mapping[str, Any], reference: str, known: Mapping[str, Any], *, is_scale_alone: bool
) -> str | None:
    deviation, own = _pool_deviations(found["std"]), _pool_deviations(known["std"])
    most = _OOD_FACTOR if is_scale_alone else _FACTOR
    factors = (_ratio(found["mean_absolute"], known["mean_absolute"]), _ratio(deviation, own))
    is_few = found["num_rows"] < _FEW_ROWS
    if min(factors) >= most:
        return (
            f"values are about {min(factors):.3g} times as large as in {reference} (uint8 is divided by 255, "
            "floats are used unchanged)"
        )
    if max(factors) <= 1 / most and not is_few:
        return (
            f"values are about {1 / max(max(factors), 1e-9):.3g} times smaller than in {reference} (uint8 is "
            "divided by 255, floats are used unchanged)"
        )
    if is_scale_alone:
        return None
    sides, own_sides = found["shape"][1:], known["shape"][1:]
    if len(sides) == len(own_sides) == 2:
        largest = max(max(_ratio(*pair), _ratio(*pair[::-1])) for pair in zip(sides, own_sides, strict=True))
        if largest >= _SIDE:
            return f"images have {_size(sides)} pixels, but {_size(own_sides)} in {reference} (see \0resize\0)"
    if is_few:
        return None
    shifts = [abs(one - other) / max(own, 1e-30) for one, other in zip(found["mean"], known["mean"], strict=False)]
    shift, spread = max(shifts, default=0.0), max(factors[1], 1 / max(factors[1], 1e-9))
    more, less = max(found["negative"], known["negative"]), min(found["negative"], known["negative"])
    if less == 0 and more >= _MUCH_NEGATIVE and (shift > _SHIFT or spread > _SPREAD):
        of_found, of_known = percent(found["negative"], ".0f"), percent(known["negative"], ".0f")
        return f"{of_found} of the values are negative, but {of_known} in {reference}: only one of them is normalised"
    mirrored = known["min"] + known["max"] - _mean(known["mean"])
    if shift > _INVERTED and spread < _ALIKE and abs(_mean(found["mean"]) - mirrored) < _NEAR * own:
        return f"images look inverted compared with {reference}"
    if shift > _LARGE_SHIFT:
        return f"the mean is {shift:.2g} standard deviations from that of {reference}; is it normalised differently?"
    return None


def _compare_tokens(name: str, found: Mapping[str, Any], reference: str, known: Mapping[str, Any]) -> str | None:
    shares, own = (
        {token: count / one["num"] for token, count in zip(one["commonest"], one["counts"], strict=True)}
        for one in (found, known)
    )
    covered, of_own = sum(share for token, share in shares.items() if token in own), sum(own.values())
    if found["num"] < _FEW_TOKENS:
        return None
    token, share = max(shares.items(), key=lambda pair: pair[1])
    if share >= _ONE_TOKEN and share >= _TIMES_AS_LARGE * own.get(token, 0.0):
        return (
            f"{name}: {percent(share, '.0f')} of its tokens have the id {token}, but "
            f"{percent(own.get(token, 0.0), '.2g')} in {reference}; if this is the unknown token, the texts or "
            "the tokenizer differ"
        )
    if covered < of_own / _COVERED:
        return (
            f"{name}: {percent(covered, '.2g')} of its tokens are among the {len(own)} most common ones of "
            f"{reference}, which make up {percent(of_own, '.2g')} there: the texts or the tokenizer differ"
        )
    return None


def _is_lenient(header: Header) -> bool:
    """Return whether a split is OOD, or its images were shifted on purpose."""
    params = header.provenance.get("params", {})
    return bool(header.meta.get("is_ood")) or any(params.get(name) is not None for name in ("rotate", "corrupt"))


def _numbers(one: Mapping[str, Any]) -> str:
    mean, std = (", ".join(f"{value:.3g}" for value in one[name]) for name in ("mean", "std"))
    return (
        f"{one['min']:.3g} to {one['max']:.3g}, mean {mean}, standard deviation {std}, "
        f"{percent(one['zeros'], '.0f')} zeros"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _pool_deviations(deviations: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in deviations) / len(deviations))


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.inf if one else 1.0


def _size(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))


FITS, OVERCONFIDENT, MISREAD = "fits", "overconfident", "misread"
_BLOCK_BYTES = 1 << 25
_LEVEL = 0.01  # level of the test that accuracy is below the threshold
_NLL_ERRORS = 2.33  # standard errors by which the NLL must exceed the uniform NLL: a one-sided 1% test
_SKILL = 0.2  # share of the way from chance to perfect accuracy
_MOST_NATS, _FEWEST_ERRORS = 50.0, 5  # mean nats per error, and the fewest errors for that mean
_MOST_CLASSES = 1000  # largest number of classes to match
_GAIN, _TIMES, _MATCH_LEVEL = 0.2, 1.5, 1e-3  # gain and ratio by which another numbering must fit better; its level
_MOST_PAIRS = 3  # pairs of a matching to name


@dataclass(frozen=True)
class NetworkFit:
    """A network's fit to the labels of a split.

    Attributes:
        accuracy, nll: over all examples, nats; also over labels if an example has several.
        uniform_nll: NLL of equal probabilities.
        largest_class: its share; with several labels, the mean share of the more common value.
        verdict: FITS, OVERCONFIDENT or MISREAD; None if the inputs were shifted on purpose.
        relabelled: a numbering of the labels that fits far better, in words, with its accuracy; None without one.
    """

    accuracy: float
    nll: float
    uniform_nll: float
    largest_class: float
    num_examples: int
    verdict: str | None
    relabelled: Mapping[str, Any] | None = None

    @property
    def nats_of_error(self) -> float:
        """Return the mean cost of an error in nats; 0 with too few errors."""
        share = 1 - self.accuracy
        return self.nll / share if round(share * self.num_examples) >= _FEWEST_ERRORS else 0.0

    @property
    def is_of_another_scale(self) -> bool:
        """Return whether errors cost more than training would produce."""
        return self.nats_of_error > _MOST_NATS

    def to_json(self) -> dict[str, Any]:
        """Return the numbers to record, rounded to six decimals."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def sentence(self, split: str) -> str:
        text = f"{split}: network accuracy {percent(self.accuracy)}, NLL {self.nll:.4f}"
        if self.verdict == OVERCONFIDENT:
            text += (
                f", higher than the {self.uniform_nll:.4f} of equal probabilities: the network is accurate but "
                "overconfident (see fit-temperature)"
            )
        return text

    def doubt(self, split: str) -> str:
        """Return what is wrong with a misread split, with the numbers."""
        text = (
            f"{split}: accuracy {percent(self.accuracy)} (largest class {percent(self.largest_class)}), "
            f"NLL {self.nll:.4f} (equal probabilities {self.uniform_nll:.4f})"
        )
        if self.relabelled is not None:
            how, accuracy = self.relabelled["how"], percent(self.relabelled["accuracy"])
            text += f"; labels look {how}; the accuracy would then be {accuracy}"
        elif self.is_of_another_scale:
            text += f"; {self.nats_of_error:.0f} nats per error"
        return text


def fit_of(content: FeatureFile, *, is_judged: bool, progress: Progress) -> NetworkFit | None:
    """Measure how the head fits a split's labels; None without a head or labels.

    Args:
        is_judged: whether to give a verdict; False for inputs shifted on purpose.
    """
    weight, labels = content.head_weight, content.labels
    if weight is None or labels is None:
        return None
    likelihood = likelihood_of(len(weight), content.likelihood)
    found = _Sums(likelihood, len(labels))
    size = max(1, _BLOCK_BYTES // (4 * weight.shape[1] + 32 * likelihood.num_classes))
    task = progress.task(f"score the network on {content.name}", len(labels))
    for start in range(0, len(labels), size):
        features = content.features[start : start + size].astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            logits = (features @ weight.T).astype(np.float64)
        if not np.isfinite(logits).all():  # overflows float32
            logits = features.astype(np.float64) @ weight.T.astype(np.float64)
        logits += 0 if content.head_bias is None else content.head_bias
        found.add(logits, labels[start : start + size], start)
        task.advance(len(features))
    return found.fit(labels, content.classes, is_judged=is_judged)


class _Sums:
    """Sums over the examples of a split, in float64."""

    def __init__(self, likelihood: Likelihood, num_examples: int) -> None:
        self.likelihood, self.num_examples, self.num_classes = likelihood, num_examples, likelihood.num_classes
        self.correct = self.loss = self.squared_loss = 0.0
        self.predicted = np.zeros(self.num_classes)
        # (2, C, C) counts by given label and predicted class, for even and odd rows.
        has_table = likelihood.is_exclusive and self.num_classes <= _MOST_CLASSES
        self.confusion = np.zeros((2, self.num_classes, self.num_classes), np.int64) if has_table else None

    def add(self, logits: NDArray, labels: NDArray, start: int) -> None:
        """Add logits (n, K) and labels (n,) or (n, C) of the rows from `start` on."""
        outputs = torch.from_numpy(logits)
        losses = self.likelihood.losses(outputs, torch.from_numpy(np.ascontiguousarray(labels)), 1.0).numpy()
        class_logits = self.likelihood.class_logits(outputs, dim=1).numpy()
        if self.likelihood.is_exclusive:
            classes = class_logits.argmax(axis=1)
            self.correct += float((classes == labels).sum())
            self.predicted += np.bincount(classes, minlength=self.num_classes)
            if self.confusion is not None:
                halves = np.arange(start, start + len(labels)) % 2
                places = (halves * self.num_classes + labels) * self.num_classes + classes
                self.confusion += np.bincount(places, minlength=self.confusion.size).reshape(self.confusion.shape)
        else:
            self.correct += float(((class_logits > 0) == (labels == 1)).mean(axis=1).sum())
            self.predicted += (class_logits > 0).sum(axis=0)
        self.loss += float(losses.sum())
        self.squared_loss += float((losses**2).sum())

    def fit(self, labels: NDArray, classes: Sequence[str], *, is_judged: bool) -> NetworkFit:
        """Return the fit over all examples, with its verdict."""
        num, num_classes = self.num_examples, self.num_classes
        given, predicted = label_counts(labels, num_classes) / num, self.predicted / num
        if self.likelihood.is_exclusive:
            uniform, largest, chance = math.log(num_classes), float(given.max()), float(given @ predicted)
        else:
            uniform, largest = math.log(2), float(np.maximum(given, 1 - given).mean())
            chance = float((given * predicted + (1 - given) * (1 - predicted)).mean())
        accuracy, nll = self.correct / num, self.loss / num
        found = NetworkFit(accuracy, nll, uniform, largest, num, None)
        if not is_judged:
            return found
        error = math.sqrt(max(self.squared_loss / num - nll**2, 0) / num)
        is_sure = nll - uniform > _NLL_ERRORS * error
        is_poor = special.bdtr(round(self.correct), num, chance + _SKILL * (1 - chance)) < _LEVEL
        relabelled = None if self.confusion is None else _find_relabelling(self.confusion, largest, classes)
        is_misread = relabelled or (is_sure and (is_poor or found.is_of_another_scale))
        verdict = MISREAD if is_misread else OVERCONFIDENT if is_sure else FITS
        return replace(found, verdict=verdict, relabelled=relabelled)


def _find_relabelling(confusion: NDArray, largest: float, classes: Sequence[str]) -> dict[str, Any] | None:
    """Return a numbering of the labels that fits far better than the given one, beyond chance; None without one."""
    total = confusion.sum(axis=0)
    num, num_classes = int(total.sum()), len(total)
    correct = int(total.trace())

    def is_far_better(count: int) -> bool:
        is_larger = count >= max(_TIMES * correct, correct + _GAIN * num)
        return is_larger and bool(special.bdtrc(count - 1, num, largest) < _MATCH_LEVEL)

    labels = np.arange(num_classes)
    for step in (-1, 1) if num_classes > 2 else ():
        count = int(total[labels, (labels + step) % num_classes].sum())
        if is_far_better(count):
            how = f"shifted by one: with label {'-' if step < 0 else '+'} 1"
            return {"how": how, "accuracy": count / num}
    if not is_far_better(int(total.max(axis=1).sum())):  # upper bound of any matching
        return None
    from scipy.optimize import linear_sum_assignment  # slow to import

    even, odd = (linear_sum_assignment(-table)[1] for table in confusion)
    count = int(confusion[1][labels, even].sum() + confusion[0][labels, odd].sum())
    if not is_far_better(count):
        return None
    best = linear_sum_assignment(-total)[1]
    moved = [label for label in labels if best[label] != label and total[label, best[label]]]
    moved.sort(key=lambda label: -total[label, best[label]])
    pairs = [
        f"{quote_name(classes[int(label)])} as {quote_name(classes[int(best[label])])}" for label in moved[:_MOST_PAIRS]
    ]
    rest = f" and {len(moved) - _MOST_PAIRS} more" if len(moved) > _MOST_PAIRS else ""
    return {"how": f"permuted: with {', '.join(pairs)}{rest}", "accuracy": count / num}


def read_recorded_fit(header: Header) -> NetworkFit | None:
    """Return a split's recorded fit; None for splits without labels or head, and of earlier versions."""
    record = header.provenance.get("network_fit")
    if record is None:
        return None
    with convert_lookup_errors(header.path):
        fit = NetworkFit(**{one.name: record[one.name] for one in fields(NetworkFit)})
        _ = fit.sentence(""), fit.doubt("")  # reads every field
    return fit


def find_misread_splits(run: Run, names: Iterable[str]) -> list[str]:
    """Return a description of each of these splits that the network misreads."""
    paths = [(name, run.folder.features(name)) for name in dict.fromkeys(names)]
    fits = [(name, read_recorded_fit(read_header(path))) for name, path in paths if path.is_file()]
    return [fit.doubt(name) for name, fit in fits if fit is not None and fit.verdict == MISREAD]


def check_network_fits(run: Run, names: Iterable[str], *, is_accepted: bool) -> None:
    """Check that the network does not misread these splits, unless accepted.

    Raises:
        CheckFailed: it does.
    """
    found = [] if is_accepted else find_misread_splits(run, names)
    if found:
        others = f"; {count_noun(len(found) - 1, 'more split')} like this" if len(found) > 1 else ""
        raise CheckFailed(
            f"the network of {run.checkpoint_path} probably misreads its inputs or labels: {found[0]}{others}",
            hint="extract the features again from the right inputs and labels with \0force\0, or add "
            "\0accept_poor_network\0",
            code="poor_network",
        )
