"""Uncertainty-aware ranking against a loop over scipy's Beta; the plain rule against a search for its threshold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from bnncli.errors import UsageError
from bnncli.numerics.dirichlet import cumulative_lengths, ranked_lengths


def concentrations(count: int = 40, num_classes: int = 15) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(-1, 4, count, dtype=torch.float64).unsqueeze(1)
    return scale + 1.5 * torch.randn(count, num_classes, generator=generator, dtype=torch.float64)


def naive_length(alpha: np.ndarray, *, rule: str, threshold: float, cap: int) -> int:
    """Algorithm 1, class by class."""
    ordered, total = np.sort(alpha)[::-1], alpha.sum()
    length = 1
    for i in range(1, min(cap, len(alpha))):
        other = ordered[i - 1] if rule == "neighbor" else ordered[0]
        lower = stats.beta.ppf(threshold / 2, other, total - other)
        if not stats.beta.ppf(1 - threshold / 2, ordered[i], total - ordered[i]) > lower:
            break
        length += 1
    return length


@pytest.mark.parametrize("cap", [1, 4, 10, 99])
@pytest.mark.parametrize("threshold", [0.05, 0.6])
@pytest.mark.parametrize("rule", ["neighbor", "best"])
def test_lengths_are_those_of_the_loop(rule: str, threshold: float, cap: int) -> None:
    log_alpha = concentrations()
    settings = {"rule": rule, "threshold": threshold, "cap": cap}
    expected = [naive_length(row, **settings) for row in log_alpha.exp().numpy()]
    got = ranked_lengths(log_alpha, **settings)
    assert got.dtype == torch.int64
    assert got.tolist() == expected
    assert cap == 1 or len(set(expected)) > 1


def test_neighbors_chain_to_ten_classes_where_against_the_best_there_are_two() -> None:
    log_alpha = torch.tensor([[200 * 0.8**i for i in range(10)]], dtype=torch.float64).log()
    lengths = [ranked_lengths(log_alpha, rule=rule, threshold=0.05).item() for rule in ("neighbor", "best")]
    assert lengths == [10, 2]


@pytest.mark.parametrize("rule", ["neighbor", "best"])
def test_a_lower_threshold_keeps_no_fewer_classes(rule: str) -> None:
    lengths = torch.stack([ranked_lengths(concentrations(), rule=rule, threshold=t) for t in (0.9, 0.5, 0.1, 0.01)])
    assert (lengths.diff(dim=0) >= 0).all()
    assert (lengths[-1] > lengths[0]).any()


def test_one_class_is_kept_where_a_point_leaves_no_doubt() -> None:
    sure = torch.tensor([[69.0, 60.0, 1.0], [1400.0, 69.0, 60.0]])
    assert ranked_lengths(sure).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "all"}, "rule: expected one of neighbor, best; got 'all'"),
        ({"threshold": 1.0}, "between 0 and 1; got 1.0"),
        ({"threshold": float("nan")}, "between 0 and 1; got nan"),
        ({"cap": 0}, "cap: expected at least 1; got 0"),
    ],
)
def test_settings_that_do_not_exist_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ranked_lengths(concentrations(), **settings)  # type: ignore[arg-type]


def sorted_probs(count: int = 200) -> Tensor:
    return torch.softmax(concentrations(count), dim=1).sort(dim=1, descending=True).values


@pytest.mark.parametrize("mean_length", [1.0, 1.005, 1.69, 4.2, 14.5, 15.0])
def test_the_cumulative_rule_has_the_mean_length_and_one_threshold(mean_length: float) -> None:
    probs = sorted_probs()
    lengths = cumulative_lengths(probs, mean_length=mean_length)
    assert lengths.double().mean().item() == pytest.approx(mean_length)
    cumulative = torch.cat([torch.zeros(200, 1), probs.cumsum(dim=1)], dim=1)
    kept, without_last = (cumulative.gather(1, (lengths - back).unsqueeze(1)) for back in (0, 1))
    below = kept[lengths < 15]
    # Some threshold is at most what each kept set sums to, and above what each sums to without its last class.
    smallest, largest = (min(below.tolist(), default=[1.0]), max(without_last[lengths > 1].tolist(), default=[0.0]))
    assert smallest[0] >= largest[0] - 1e-15


def test_ties_of_the_cumulative_rule_lengthen_each_example_in_turn() -> None:
    certain = torch.tensor([[1.0, 0.0, 0.0]]).repeat(4, 1)
    assert cumulative_lengths(certain, mean_length=1.5).tolist() == [2, 2, 1, 1]
    assert cumulative_lengths(certain, mean_length=2.25).tolist() == [3, 2, 2, 2]


@pytest.mark.parametrize("mean_length", [0.9, 15.1, float("nan")])
def test_a_mean_length_that_cannot_be_had_is_refused(mean_length: float) -> None:
    with pytest.raises(ValueError, match="expected a mean length from 1 to 15"):
        cumulative_lengths(sorted_probs(), mean_length=mean_length)
