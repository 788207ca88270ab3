"""Measured numbers, formulas of them with standard errors, and rules that hold, fail or stay open.

Formulas and rules are texts, written as in the results: `nll_r5 - nll_la`, `100 * mean(a, b)`, `a < b and b < 0.1`. A formula over
numbers of several checkpoints is computed on each; its standard error is that of the mean. For numbers that were measured once, each
part is moved up and down by its standard error and the larger changes are added in squares. Parts with a known correlation (scores of
the same examples) move together along the principal axes of their covariance. All others count as independent, and so do the parts of
a minimum, where chance decides which one is smallest.
"""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType

import numpy as np

from bnncli.errors import DataError
from bnncli.evaluation.comparison import LEVEL, Estimate, sign

Replicates = tuple[Estimate, ...]  # of one number: one estimate for each checkpoint, or a single one
Correlations = Mapping[tuple[str, str], float]  # of two numbers, by their names in either order
_FUNCTIONS = {"abs": abs, "min": min, "mean": lambda *values: statistics.fmean(values)}


class Unmeasured(DataError):
    """A number was not measured; the message says why."""


def mean(*formulas: str) -> str:
    """Return the mean of several formulas."""
    return f"mean({', '.join(formulas)})"


def require_all(rule: str, *words: object) -> str:
    """Return the rule that a rule with places for a word, {0}, holds for every word."""
    return " and ".join(rule.format(word) for word in words)


def require_any(rule: str, *words: object) -> str:
    """Return the rule that a rule with places for a word, {0}, holds for at least one word."""
    return " or ".join(rule.format(word) for word in words)


@cache
def list_names(text: str) -> tuple[str, ...]:
    """Return the names of the measured numbers in a formula or rule, each once, outermost first."""
    names = (node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name))
    return tuple(dict.fromkeys(name for name in names if name not in _FUNCTIONS))


@cache
def _compile(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")


def _evaluate(formula: str, values: Mapping[str, float]) -> float:
    return float(eval(_compile(formula), {"__builtins__": _FUNCTIONS}, dict(values)))


@cache
def _differences(rule: str) -> tuple[list[str], bool]:
    """Return a rule's comparisons, each as a formula that is positive if it holds, and whether all of them must hold."""
    body = ast.parse(rule, mode="eval").body
    found = []
    for part in body.values if isinstance(body, ast.BoolOp) else [body]:
        if not isinstance(part, ast.Compare) or len(part.ops) != 1 or not isinstance(part.ops[0], ast.Lt | ast.Gt):
            raise ValueError(f"{rule}: expected comparisons of two sides by < or >, joined by all and or all or")
        small, large = ast.unparse(part.left), ast.unparse(part.comparators[0])
        found.append(f"({large}) - ({small})" if isinstance(part.ops[0], ast.Lt) else f"({small}) - ({large})")
    return found, not (isinstance(body, ast.BoolOp) and isinstance(body.op, ast.Or))


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
    why: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    correlations: Correlations = field(default_factory=dict)

    def _select(self, text: str) -> dict[str, Replicates]:
        """Return the numbers of a formula or rule. Raises Unmeasured if one is missing."""
        for name in list_names(text):
            if name not in self.found:
                raise Unmeasured(self.why.get(name, self.otherwise or f"the experiment does not return {name}"))
        return {name: self.found[name] for name in list_names(text)}

    def estimate(self, formula: str) -> Estimate:
        """Compute a formula. Raises Unmeasured if one of its numbers is missing or the value is not finite."""
        return self._estimate(formula, self._select(formula))

    def decide(self, rule: str) -> bool | None:
        """Return whether a rule holds, or None if chance may have decided. Raises Unmeasured as `estimate` does.

        Each verdict is wrong with probability LEVEL / 2 at most: where one of several comparisons suffices for it, these share the
        level.
        """
        self._select(rule)
        differences, needs_all = _differences(rule)
        for verdict in (True, False):
            enough, level = (all, LEVEL) if needs_all is verdict else (any, LEVEL / len(differences))
            if enough(self._sign(one, level) == (1 if verdict else -1) for one in differences):
                return verdict
        return None

    def constants(self, rule: str) -> list[str]:
        """Return the numbers of a rule whose standard error is 0: all examples, repeats or checkpoints gave the same."""
        return [name for name, found in self._select(rule).items() if _is_constant(found)]

    def _sign(self, difference: str, level: float) -> int:
        """Return the sign of a difference; 0 if chance may decide it, or if a standard error of 0 leaves chance unknown."""
        numbers = self._select(difference)
        found = self._estimate(difference, numbers)
        if found.count and not found.standard_error:  # checkpoints that gave the same count as one
            found = self._estimate(difference, {name: one[:1] for name, one in numbers.items()})
        is_unknown = found.standard_error == 0 or any(map(_is_constant, numbers.values()))
        return 0 if is_unknown else sign(found, level)

    def _estimate(self, formula: str, found: Mapping[str, Replicates]) -> Estimate:
        counts = {len(one) for one in found.values()} - {1}
        if len(counts) > 1:
            raise Unmeasured(f"one formula mixes numbers of {min(counts)} and of {max(counts)} checkpoints")
        try:
            if not counts:
                return self._of_one(formula, {name: one[0] for name, one in found.items()})
            (count,) = counts
            each = [{name: one[place if len(one) > 1 else 0] for name, one in found.items()} for place in range(count)]
            values = [_evaluate(formula, {name: one.value for name, one in parts.items()}) for parts in each]
            return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(count), count)
        except (ValueError, ZeroDivisionError, OverflowError, TypeError) as error:
            raise Unmeasured(f"it has no finite value: {error}") from None

    def _of_one(self, formula: str, found: Mapping[str, Estimate]) -> Estimate:
        values = {name: one.value for name, one in found.items()}
        value, variance = _evaluate(formula, values), 0.0
        for move in self._moves(formula, found):
            moved = (
                _evaluate(formula, {name: one + s * move.get(name, 0.0) for name, one in values.items()})
                for s in (1, -1)
            )
            variance += max(abs(one - value) for one in moved) ** 2  # both would cancel where abs or min bends
        smallest_count = min((one.count for one in found.values() if one.standard_error and one.count > 1), default=0)
        is_known = any(one.standard_error is not None for one in found.values())
        return Estimate(value, math.sqrt(variance) if is_known else None, smallest_count)

    def _moves(self, formula: str, found: Mapping[str, Estimate]) -> Iterator[dict[str, float]]:
        """Yield independent changes of the parts, each as large as its standard error."""
        errors = {name: one.standard_error for name, one in found.items() if one.standard_error}
        paired = {name for pair in self.correlations if errors.keys() >= {*pair} for name in pair}
        together = [] if "min" in _compile(formula).co_names else [name for name in errors if name in paired]
        yield from ({name: error} for name, error in errors.items() if name not in together)
        if together:
            covariance = [[errors[a] * errors[b] * self._correlation(a, b) for b in together] for a in together]
            variances, axes = np.linalg.eigh(np.array(covariance))
            for variance, axis in zip(variances, axes.T, strict=True):
                scale = math.sqrt(max(variance, 0.0))
                yield {name: scale * float(part) for name, part in zip(together, axis, strict=True)}

    def _correlation(self, a: str, b: str) -> float:
        return 1.0 if a == b else self.correlations.get((a, b), self.correlations.get((b, a), 0.0))


def _is_constant(found: Replicates) -> bool:
    is_exact = len(found) == 1 and found[0].standard_error is None
    return not is_exact and len({one.value for one in found}) == 1 and not any(one.standard_error for one in found)
