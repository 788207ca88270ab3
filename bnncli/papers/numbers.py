"""Measured numbers, formulas of them with standard errors, and rules that hold, fail or stay open.

A formula over numbers that were measured on several checkpoints is computed on each; its standard error is that of the mean. For
numbers that were measured once, each part is moved up and down by its standard error and the larger changes are added in squares.
Parts whose correlation is known (scores of the same examples) move together along the principal axes of their covariance. All
others count as independent, and so do the parts of a minimum, where chance decides which one is smallest.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from bnncli.errors import DataError
from bnncli.evaluation.comparison import LEVEL, Estimate, sign

Replicates = tuple[Estimate, ...]  # of one number: one estimate for each checkpoint, or a single one
Correlations = Mapping[tuple[str, str], float]  # of two numbers, by their names in either order
_SUM, _PRODUCT, _MINUS, _ATOM = range(4)  # how tightly an operator binds


class Unmeasured(DataError):
    """A number was not measured; the message says why."""


@dataclass(frozen=True, eq=False)
class Formula:
    """A measured number, a constant, or a formula of these, built with Python's operators.

    Args:
        text: the name of a measured number, or the formula as it is written in results.
        parts: the operands of a formula.
        function: from the operands' values to the formula's value; None for a measured number.
        binding: how tightly the outermost operator binds.
    """

    text: str
    parts: tuple[Formula, ...] = ()
    function: Callable[..., float] | None = None
    binding: int = _ATOM

    def value(self, values: Mapping[str, float]) -> float:
        """Compute the formula from the values of its numbers."""
        if self.function is None:
            return values[self.text]
        return float(self.function(*(part.value(values) for part in self.parts)))

    def __add__(self, other: Formula | float) -> Formula:
        return _combine("+", operator.add, _SUM, self, other)

    def __sub__(self, other: Formula | float) -> Formula:
        return _combine("-", operator.sub, _SUM, self, other)

    def __mul__(self, other: Formula | float) -> Formula:
        return _combine("*", operator.mul, _PRODUCT, self, other)

    def __rmul__(self, other: float) -> Formula:
        return _combine("*", operator.mul, _PRODUCT, other, self)

    def __truediv__(self, other: Formula | float) -> Formula:
        return _combine("/", operator.truediv, _PRODUCT, self, other)

    def __neg__(self) -> Formula:
        return Formula(f"-{_enclose(self, _MINUS)}", (self,), operator.neg, _MINUS)

    def __abs__(self) -> Formula:
        return Formula(f"abs({self.text})", (self,), abs)

    def __lt__(self, other: Formula | float) -> Inequality:
        return Inequality(self, "<", _formula(other))

    def __gt__(self, other: Formula | float) -> Inequality:
        return Inequality(self, ">", _formula(other))


def mean(*parts: Formula) -> Formula:
    """Return the mean of several formulas."""
    text = ", ".join(part.text for part in parts)
    return Formula(f"mean({text})", parts, lambda *values: statistics.fmean(values))


def smallest(*parts: Formula) -> Formula:
    """Return the minimum of several formulas."""
    text = ", ".join(part.text for part in parts)
    return Formula(f"min({text})", parts, min)


def _formula(value: Formula | float) -> Formula:
    return value if isinstance(value, Formula) else Formula(repr(value), (), lambda: value)


def _combine(
    symbol: str, function: Callable[..., float], binding: int, left: Formula | float, right: Formula | float
) -> Formula:
    left, right = _formula(left), _formula(right)
    text = f"{_enclose(left, binding)} {symbol} {_enclose(right, binding + 1)}"
    return Formula(text, (left, right), function, binding)


def _enclose(part: Formula, binding: int) -> str:
    return part.text if part.binding >= binding else f"({part.text})"


@dataclass(frozen=True, eq=False)
class Inequality:
    """Whether one formula is below (`<`) or above (`>`) another."""

    left: Formula
    symbol: str
    right: Formula

    @property
    def text(self) -> str:
        """The comparison as it is written in results."""
        return f"{self.left.text} {self.symbol} {self.right.text}"

    @property
    def parts(self) -> tuple[Formula, ...]:
        """Both sides."""
        return self.left, self.right

    @property
    def difference(self) -> Formula:
        """The larger side minus the smaller one, if the comparison holds."""
        return self.right - self.left if self.symbol == "<" else self.left - self.right

    def __bool__(self) -> bool:
        raise TypeError(f"{self.text} is decided when its numbers are measured: join comparisons by all_of or any_of")


@dataclass(frozen=True, eq=False)
class Combination:
    """Comparisons of which all, or at least one, must hold."""

    parts: tuple[Inequality, ...]
    needs_all: bool

    @property
    def text(self) -> str:
        """The rule as it is written in results."""
        return (" and " if self.needs_all else " or ").join(part.text for part in self.parts)


Rule = Inequality | Combination


def all_of(*parts: Inequality) -> Combination:
    """Require every comparison to hold."""
    return Combination(parts, needs_all=True)


def any_of(*parts: Inequality) -> Combination:
    """Require at least one comparison to hold."""
    return Combination(parts, needs_all=False)


def list_names(formula: Formula | Rule) -> list[str]:
    """Return the names of the measured numbers in a formula or rule, each once, outermost first."""
    found: dict[str, None] = {}
    level: list[Formula | Inequality | Combination] = [formula]
    while level:
        found |= dict.fromkeys(one.text for one in level if isinstance(one, Formula) and one.function is None)
        level = [part for one in level for part in one.parts]
    return list(found)


def _has_minimum(formula: Formula) -> bool:
    return formula.function is min or any(map(_has_minimum, formula.parts))


@dataclass(frozen=True)
class Numbers:
    """What was measured, and why the rest was not.

    Args:
        found: by name.
        why: by the name of a number that was not measured.
        otherwise: the reason for names in neither; empty if there is none.
        correlations: of pairs that were measured on the same examples.
    """

    found: Mapping[str, Replicates]
    why: Mapping[str, str]
    otherwise: str = ""
    correlations: Correlations = field(default_factory=dict)

    def check(self, formula: Formula | Rule) -> None:
        """Raise Unmeasured unless every number of a formula or rule was measured."""
        for name in list_names(formula):
            if name not in self.found:
                raise Unmeasured(self.why.get(name, self.otherwise or f"the experiment does not return {name}"))

    def estimate(self, formula: Formula) -> Estimate:
        """Compute a formula. Raises Unmeasured if one of its numbers is missing or the value is not finite."""
        self.check(formula)
        found = {name: self.found[name] for name in list_names(formula)}
        return self._estimate(formula, found)

    def decide(self, rule: Rule) -> bool | None:
        """Return whether a rule holds, or None if chance may have decided. Raises Unmeasured as `estimate` does.

        Each verdict is wrong with probability LEVEL / 2 at most: where one of several comparisons suffices for it, these share
        the level.
        """
        self.check(rule)
        return next((verdict for verdict in (True, False) if self._is_shown(rule, verdict, LEVEL)), None)

    def constants(self, rule: Rule) -> list[str]:
        """Return the numbers of a rule whose standard error is 0: all examples, repeats or checkpoints gave the same."""
        return [name for name in list_names(rule) if _is_constant(self.found[name])]

    def _is_shown(self, rule: Rule, verdict: bool, level: float) -> bool:
        if isinstance(rule, Inequality):
            return self._sign(rule.difference, level) == (1 if verdict else -1)
        needs_all = rule.needs_all is verdict
        share = level if needs_all else level / len(rule.parts)
        found = [self._is_shown(part, verdict, share) for part in rule.parts]
        return all(found) if needs_all else any(found)

    def _sign(self, difference: Formula, level: float) -> int:
        """Return the sign of a difference; 0 if chance may decide it, or if a standard error of 0 leaves chance unknown."""
        numbers = {name: self.found[name] for name in list_names(difference)}
        found = self._estimate(difference, numbers)
        if found.count and not found.standard_error:  # checkpoints that gave the same count as one
            found = self._estimate(difference, {name: one[:1] for name, one in numbers.items()})
        if found.standard_error == 0 or any(map(_is_constant, numbers.values())):
            return 0
        return sign(found, level)

    def _estimate(self, formula: Formula, found: Mapping[str, Replicates]) -> Estimate:
        counts = {len(one) for one in found.values()} - {1}
        if len(counts) > 1:
            raise Unmeasured(f"one formula mixes numbers of {min(counts)} and of {max(counts)} checkpoints")
        try:
            if counts:
                return _combine_values(formula, found, counts.pop())
            return self._of_one(formula, {name: one[0] for name, one in found.items()})
        except (ValueError, ZeroDivisionError, OverflowError, TypeError) as error:
            raise Unmeasured(f"it has no finite value: {error}") from None

    def _of_one(self, formula: Formula, found: Mapping[str, Estimate]) -> Estimate:
        values = {name: one.value for name, one in found.items()}
        value, variance = formula.value(values), 0.0
        for move in self._moves(formula, found):
            moved = [
                formula.value({name: each + s * move.get(name, 0.0) for name, each in values.items()}) for s in (1, -1)
            ]
            variance += max(abs(each - value) for each in moved) ** 2  # both would cancel where abs or min bends
        smallest_count = min((one.count for one in found.values() if one.standard_error and one.count > 1), default=0)
        is_known = any(one.standard_error is not None for one in found.values())
        return Estimate(value, math.sqrt(variance) if is_known else None, smallest_count)

    def _moves(self, formula: Formula, found: Mapping[str, Estimate]) -> Iterator[dict[str, float]]:
        """Yield independent changes of the parts, each as large as its standard error."""
        errors = {name: one.standard_error for name, one in found.items() if one.standard_error}
        paired = {name for pair in self.correlations if errors.keys() >= {*pair} for name in pair}
        together = [] if _has_minimum(formula) else [name for name in errors if name in paired]
        yield from ({name: error} for name, error in errors.items() if name not in together)
        if together:
            covariance = [[errors[a] * errors[b] * self._correlation(a, b) for b in together] for a in together]
            variances, axes = np.linalg.eigh(np.array(covariance))
            for variance, axis in zip(variances, axes.T, strict=True):
                scale = math.sqrt(max(variance, 0.0))
                yield {name: scale * float(part) for name, part in zip(together, axis, strict=True)}

    def _correlation(self, a: str, b: str) -> float:
        return 1.0 if a == b else self.correlations.get((a, b), self.correlations.get((b, a), 0.0))


def _combine_values(formula: Formula, found: Mapping[str, Replicates], count: int) -> Estimate:
    values = [
        formula.value({name: one[place if len(one) > 1 else 0].value for name, one in found.items()})
        for place in range(count)
    ]
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(count), count)


def _is_constant(found: Replicates) -> bool:
    is_exact = len(found) == 1 and found[0].standard_error is None
    return not is_exact and len({one.value for one in found}) == 1 and not any(one.standard_error for one in found)
