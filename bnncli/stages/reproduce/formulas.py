"""Formulas of measured numbers with their standard errors, and rules that are true, false or open.

A number that was measured on several checkpoints is computed on each, and its standard error is theirs; of one that was measured
once it is that of its parts: each part moved up and down by its standard error, the larger changes added in squares. Parts whose correlation was
measured (scores of the same examples) are moved together, along the principal axes of their covariance; all others are taken for
independent, and so are those of a min or max, whose smallest or largest part by chance they decide together.
"""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from bnncli.errors import DataError
from bnncli.evaluation.agreement import LEVEL, Estimate, sign

Replicates = tuple[Estimate, ...]  # of one number: by checkpoint, or the one
Numbers = Mapping[str, Replicates]
Correlations = Mapping[tuple[str, str], float]  # of two numbers, by their names in either order
_NONE: Correlations = {}

_FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "log": math.log,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "mean": lambda *values: statistics.fmean(values),
}
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}


class Unmeasured(DataError):
    """A number of a formula that was not measured, and why."""


def names_in(text: str) -> list[str]:
    """Names of numbers in a formula or a rule, each once. Raises ValueError where it is neither."""
    tree = ast.parse(text.strip(), mode="eval").body
    _check(tree)
    return _names(tree)


def _names(tree: ast.expr) -> list[str]:
    found = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in _FUNCTIONS)
    return list(dict.fromkeys(found))


def is_rule(text: str) -> bool:
    """Whether a text compares formulas."""
    return isinstance(ast.parse(text.strip(), mode="eval").body, ast.Compare | ast.BoolOp)


def estimate(text: str, numbers: Numbers, correlations: Correlations = _NONE) -> Estimate:
    """The value of a formula. Raises Unmeasured where a number is missing, or it has no finite value."""
    return _estimate(ast.parse(text.strip(), mode="eval").body, numbers, correlations)


def decided(text: str, numbers: Numbers, correlations: Correlations = _NONE) -> bool | None:
    """Whether a rule holds; None where chance may have decided. Raises Unmeasured as `estimate` does.

    Either is said falsely with probability LEVEL / 2 at most: where one of several comparisons is enough for it, each has its share of that.
    """
    rule = ast.parse(text.strip(), mode="eval").body
    for verdict in (True, False):
        if _is_shown(rule, verdict, LEVEL, numbers=numbers, correlations=correlations):
            return verdict
    return None


def _is_shown(node: ast.expr, verdict: bool, level: float, *, numbers: Numbers, correlations: Correlations) -> bool:
    """Whether a rule is that, true or false, beyond chance."""
    if isinstance(node, ast.BoolOp):
        needs_all = isinstance(node.op, ast.And) is verdict
        share = level if needs_all else level / len(node.values)
        found = [_is_shown(one, verdict, share, numbers=numbers, correlations=correlations) for one in node.values]
    else:
        assert isinstance(node, ast.Compare)
        needs_all, pairs = verdict, list(_pairs(node))
        share = level if needs_all else level / len(pairs)
        wanted = 1 if verdict else -1
        found = [_sign(*pair, share, numbers=numbers, correlations=correlations) == wanted for pair in pairs]
    return all(found) if needs_all else any(found)


def _sign(smaller: ast.expr, larger: ast.expr, level: float, *, numbers: Numbers, correlations: Correlations) -> int:
    """Of larger - smaller; 0 where a standard error is, for what chance may do is not known then."""
    difference = ast.BinOp(larger, ast.Sub(), smaller)
    found = _estimate(difference, numbers, correlations)
    if found.count and not found.standard_error:  # checkpoints that gave the same are one
        found = _estimate(difference, {name: numbers[name][:1] for name in _names(difference)}, correlations)
    if found.standard_error == 0 or any(_is_constant(numbers[name]) for name in _names(difference)):
        return 0
    return sign(found, level)


def constants(text: str, numbers: Numbers) -> list[str]:
    """Names of a rule whose numbers have a standard error of 0: all examples, repeats or checkpoints gave the same."""
    return [name for name in names_in(text) if _is_constant(numbers[name])]


def _is_constant(found: Replicates) -> bool:
    is_exact = len(found) == 1 and found[0].standard_error is None
    return not is_exact and len({one.value for one in found}) == 1 and not any(one.standard_error for one in found)


def _pairs(node: ast.Compare) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Of each comparison what is to be smaller, and what larger."""
    sides = [node.left, *node.comparators]
    for place, operator in enumerate(node.ops):
        pair = sides[place], sides[place + 1]
        yield pair if isinstance(operator, ast.Lt) else (pair[1], pair[0])


def _estimate(node: ast.expr, numbers: Numbers, correlations: Correlations) -> Estimate:
    found = {name: numbers[name] for name in _names(node)}
    counts = {len(one) for one in found.values()} - {1}
    if len(counts) > 1:
        raise Unmeasured(f"one formula mixes numbers of {min(counts)} and of {max(counts)} checkpoints")
    try:
        if not counts:
            return _of_one(node, {name: one[0] for name, one in found.items()}, correlations)
        return _of_several(node, found, counts.pop())
    except (ValueError, ZeroDivisionError, OverflowError, TypeError) as error:
        raise Unmeasured(f"it has no finite value: {error}") from None


def _of_several(node: ast.expr, found: Numbers, count: int) -> Estimate:
    values = [
        _value(node, {name: one[place if len(one) > 1 else 0].value for name, one in found.items()})
        for place in range(count)
    ]
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(count), count)


def _of_one(node: ast.expr, found: Mapping[str, Estimate], correlations: Correlations) -> Estimate:
    values = {name: one.value for name, one in found.items()}
    value, variance = _value(node, values), 0.0
    for move in _moves(node, found, correlations):
        moved = (_value(node, {name: each + s * move.get(name, 0.0) for name, each in values.items()}) for s in (1, -1))
        variance += max(abs(each - value) for each in moved) ** 2  # both would cancel where abs, min or max bends
    smallest = min((one.count for one in found.values() if one.standard_error and one.count > 1), default=0)
    is_known = any(one.standard_error is not None for one in found.values())
    return Estimate(value, math.sqrt(variance) if is_known else None, smallest)


def _moves(node: ast.expr, found: Mapping[str, Estimate], correlations: Correlations) -> Iterator[dict[str, float]]:
    """Changes of the parts that are independent of each other, each as large as its standard error."""
    errors = {name: one.standard_error for name, one in found.items() if one.standard_error}
    bends = any(isinstance(one, ast.Name) and one.id in ("min", "max") for one in ast.walk(node))
    together = (
        [] if bends else [name for name in errors if any(_is_known(name, other, correlations) for other in errors)]
    )
    yield from ({name: error} for name, error in errors.items() if name not in together)
    if together:
        covariance = np.array([[_covariance(a, b, errors, correlations) for b in together] for a in together])
        variances, axes = np.linalg.eigh(covariance)
        for variance, axis in zip(variances, axes.T, strict=True):
            yield {name: math.sqrt(max(variance, 0.0)) * float(part) for name, part in zip(together, axis, strict=True)}


def _is_known(a: str, b: str, correlations: Correlations) -> bool:
    return (a, b) in correlations or (b, a) in correlations


def _covariance(a: str, b: str, errors: Mapping[str, float], correlations: Correlations) -> float:
    return errors[a] * errors[b] * (1.0 if a == b else correlations.get((a, b), correlations.get((b, a), 0.0)))


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    """One value of a formula that was checked."""
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, values)
    if isinstance(node, ast.BinOp):
        return float(_OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values)))
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return float(_FUNCTIONS[node.func.id](*(_value(one, values) for one in node.args)))


def _check(node: ast.expr) -> None:
    """Raise ValueError where something stands in a formula that has no meaning in one."""
    parts: Sequence[ast.expr]
    if isinstance(node, ast.BoolOp):
        parts = node.values
    elif isinstance(node, ast.Compare) and all(isinstance(one, ast.Lt | ast.Gt) for one in node.ops):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        parts = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        parts = [node.operand]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        parts = node.args
    elif isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
        parts = []
    else:
        raise ValueError(
            f"expected numbers, names, + - * / **, {', '.join(_FUNCTIONS)}, < and >, and, or; got {ast.unparse(node)!r}"
        )
    if not isinstance(node, ast.BoolOp) and any(isinstance(one, ast.BoolOp | ast.Compare) for one in parts):
        raise ValueError(f"a comparison cannot be part of a formula: {ast.unparse(node)!r}")
    if isinstance(node, ast.BoolOp) and not all(isinstance(one, ast.BoolOp | ast.Compare) for one in parts):
        raise ValueError(f"expected comparisons around and, or; got {ast.unparse(node)!r}")
    for one in parts:
        _check(one)
