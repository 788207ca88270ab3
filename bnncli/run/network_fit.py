"""How well a run's network fits the labels of its splits, and whether its inputs or labels were probably misread.

extract-features records this with the features of every labelled split: features times head are the network's logits. A
network is taken for misread on a split where one of these holds:

- its NLL is above that of equal probabilities, and its accuracy is below what chance gives plus a fifth of the rest (both at 1 %).
  Chance is the agreement of labels and predictions that are independent (Cohen 1960): at most the share of the largest class.
- its NLL is above that of equal probabilities, and an error costs more nats than training by cross-entropy leads to: inputs of
  another scale. The fixtures' network, trained to the end, has 5 nats an error, and 960 on pixels in 0..255. With less it is
  accurate but overconfident.
- another numbering of the labels fits far better: label - 1, label + 1, or the best matching of labels and predictions, found on
  one half of the rows and counted on the other, so that a network at chance gains nothing by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.features import FeatureFile, label_counts
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, interpreting
from bnncli.errors import CheckFailed
from bnncli.lazy import special, torch
from bnncli.likelihoods import Likelihood, likelihood_of
from bnncli.names import counted, percent, quoted
from bnncli.progress import Progress
from bnncli.run.session import Run

FITS, OVERCONFIDENT, MISREAD = "fits", "overconfident", "misread"
_BLOCK_BYTES = 1 << 25
_LEVEL = 0.01  # of calling a network misread by its accuracy, where that is just the threshold
_NLL_ERRORS = 2.33  # standard errors that the NLL must be above that of equal probabilities: 1 % of a normal's mass
_SKILL = 0.2  # of the way from chance to all right
_MOST_NATS, _FEWEST_ERRORS = 50.0, 5  # of an error on average, and so many errors that it is one
_MOST_CLASSES = 1000  # of which a matching is looked for
_GAIN, _TIMES, _MATCH_LEVEL = 0.2, 1.5, 1e-3  # by which another numbering must fit better, and its level
_MOST_PAIRS = 3  # of a matching that are named


@dataclass(frozen=True)
class NetworkFit:
    """How a network fits the labels of a split.

    Attributes:
        accuracy, nll: of all examples, nats; where an example has several labels, means over these too.
        uniform_nll: of equal probabilities.
        largest_class: its share; of several labels the mean share of the commoner value.
        verdict: FITS, OVERCONFIDENT or MISREAD; None where the inputs were shifted on purpose.
        relabelled: the numbering of the labels that fits far better, in words, with its accuracy; None without one.
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
        """What an error costs on average; 0 where there are too few errors to tell."""
        share = 1 - self.accuracy
        return self.nll / share if round(share * self.num_examples) >= _FEWEST_ERRORS else 0.0

    @property
    def is_of_another_scale(self) -> bool:
        """Whether errors cost more than training leads to."""
        return self.nats_of_error > _MOST_NATS

    def to_json(self) -> dict[str, Any]:
        """Numbers as they are recorded, to six digits after the point."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def sentence(self, split: str) -> str:
        """Return the line for one split."""
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
    """Return how the head fits a split's labels; None without a head or without labels.

    Args:
        is_judged: whether there is a verdict, as of inputs that were not shifted on purpose.
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
        if not np.isfinite(logits).all():  # beyond float32
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
        # (2, C, C): given label, predicted class; of rows with even and with odd numbers.
        has_table = likelihood.is_exclusive and self.num_classes <= _MOST_CLASSES
        self.confusion = np.zeros((2, self.num_classes, self.num_classes), np.int64) if has_table else None

    def add(self, logits: NDArray, labels: NDArray, start: int) -> None:
        """Take in logits (n, K) and labels (n,), or (n, C) of several, of the rows from `start` on."""
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
        """Return the numbers of all examples, and the verdict."""
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
        relabelled = None if self.confusion is None else _relabelled(self.confusion, largest, classes)
        is_misread = relabelled or (is_sure and (is_poor or found.is_of_another_scale))
        verdict = MISREAD if is_misread else OVERCONFIDENT if is_sure else FITS
        return replace(found, verdict=verdict, relabelled=relabelled)


def _relabelled(confusion: NDArray, largest: float, classes: Sequence[str]) -> dict[str, Any] | None:
    """Return the numbering of the labels that fits far better than the one given, beyond chance; None without one."""
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
    if not is_far_better(int(total.max(axis=1).sum())):  # which no matching is above
        return None
    from scipy.optimize import linear_sum_assignment  # here, as it is slow to import

    even, odd = (linear_sum_assignment(-table)[1] for table in confusion)
    count = int(confusion[1][labels, even].sum() + confusion[0][labels, odd].sum())
    if not is_far_better(count):
        return None
    best = linear_sum_assignment(-total)[1]
    moved = [label for label in labels if best[label] != label and total[label, best[label]]]
    moved.sort(key=lambda label: -total[label, best[label]])
    pairs = [f"{quoted(classes[int(label)])} as {quoted(classes[int(best[label])])}" for label in moved[:_MOST_PAIRS]]
    rest = f" and {len(moved) - _MOST_PAIRS} more" if len(moved) > _MOST_PAIRS else ""
    return {"how": f"permuted: with {', '.join(pairs)}{rest}", "accuracy": count / num}


def recorded_fit(header: Header) -> NetworkFit | None:
    """Return what the features of a split record; None of splits without labels or head, and of earlier versions."""
    record = header.provenance.get("network_fit")
    if record is None:
        return None
    with interpreting(header.path):
        fit = NetworkFit(**{one.name: record[one.name] for one in fields(NetworkFit)})
        _ = fit.sentence(""), fit.doubt("")  # which look at all of it
    return fit


def misread_splits(run: Run, names: Iterable[str]) -> list[str]:
    """Return what is wrong with each of these splits that the network was found to misread."""
    paths = [(name, run.folder.features(name)) for name in dict.fromkeys(names)]
    fits = [(name, recorded_fit(read_header(path))) for name, path in paths if path.is_file()]
    return [fit.doubt(name) for name, fit in fits if fit is not None and fit.verdict == MISREAD]


def check_network_fits(run: Run, names: Iterable[str], *, is_accepted: bool) -> None:
    """Pass where the network was not found to misread these splits, or that is accepted. Raises CheckFailed otherwise."""
    found = [] if is_accepted else misread_splits(run, names)
    if found:
        others = f"; {counted(len(found) - 1, 'more split')} like this" if len(found) > 1 else ""
        raise CheckFailed(
            f"the network of {run.checkpoint_path} probably misreads its inputs or labels: {found[0]}{others}",
            hint="extract the features again from the right inputs and labels with \0force\0, or add "
            "\0accept_poor_network\0",
            code="poor_network",
        )
