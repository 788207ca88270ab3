"""Running sums, the largest entries, and permutations against NumPy and torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pretend_cuda
import pytest
import torch
from scipy import stats
from torch import Tensor

from bnncli.errors import UsageError
from bnncli.evaluation.feature_scores import Mahalanobis
from bnncli.flows import build_layers
from bnncli.integrators._partitions import central_interval
from bnncli.numerics import random
from bnncli.numerics.dirichlet import cumulative_lengths, ranked_lengths
from bnncli.numerics.random import permutation, stream_seed
from bnncli.numerics.running_sum import running_sum, running_sum_by_products
from bnncli.parameters.layouts import HeadLayout


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1, 2, 64, 65, 128, 1000, 64 * 64 + 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_products_add_up_as_float64_does(size: int, dtype: torch.dtype, tolerance: float) -> None:
    values = torch.rand(3, 2, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    exact = values.double().cumsum(dim=-1)
    torch.testing.assert_close(running_sum_by_products(values).double(), exact, rtol=tolerance, atol=0)
    assert torch.equal(running_sum(values), values.cumsum(dim=-1))


def test_products_have_the_gradient_of_a_running_sum() -> None:
    values = torch.rand(2, 130, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 130, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((sums * weights).sum(), values)[0]
        for sums in (running_sum_by_products(values), values.cumsum(-1))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("deterministic")
def test_splines_are_the_cpus_where_kernels_must_be_deterministic() -> None:
    layout, generator = HeadLayout(3, 4), torch.Generator().manual_seed(0)
    (layer,) = build_layers("spline", layout, generator, length=1)
    torch.nn.init.normal_(layer.network.weight, generator=generator)
    z = torch.randn(5, layout.num_params, generator=generator, dtype=torch.float64)
    image, log_det = layer(z)
    with pretend_cuda.pretend() as gpu:
        there, log_det_there = layer.to(device="cuda")(z.to("cuda"))
        (there.sum() + log_det_there.sum()).backward()
        there, log_det_there = there.detach().cpu(), log_det_there.detach().cpu()
    assert gpu.problems() == []
    torch.testing.assert_close(there, image, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(log_det_there, log_det, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("deterministic")
def test_weighted_intervals_are_the_cpus_where_kernels_must_be_deterministic() -> None:
    generator = torch.Generator().manual_seed(0)
    draws, weights = torch.randn(4, 200, generator=generator), torch.rand(200, generator=generator)
    ends = central_interval(draws, weights)
    with pretend_cuda.pretend() as gpu:
        there = central_interval(draws.to("cuda"), weights.to("cuda")).cpu()
    assert gpu.problems() == []
    torch.testing.assert_close(there, ends)


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_class_means_of_features_are_the_cpus_in_one_order(
    is_deterministic: bool, request: pytest.FixtureRequest
) -> None:
    if is_deterministic:
        request.getfixturevalue("deterministic")
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(50, 4, generator=generator), torch.arange(50) % 3 * 2
    scores = Mahalanobis.fit(features, labels, device=torch.device("cpu")).scores(features)
    with pretend_cuda.pretend() as gpu:
        fitted = Mahalanobis.fit(features.to("cuda"), labels.to("cuda"), device=torch.device("cuda:0"))
        there = fitted.scores(features.to("cuda"))
    assert gpu.problems() == []
    for name, score in scores.items():
        torch.testing.assert_close(there[name], score)


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


SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, *(stream_seed(seed, "extract-features/hold-out") for seed in range(3)))


def expected(num_items: int, seed: int) -> np.ndarray:
    return np.asarray(torch.randperm(num_items, generator=torch.Generator().manual_seed(seed)))


# 624 is the length of the generator's state, of which all is made anew when it is used up.
@pytest.mark.parametrize("num_items", [0, 1, 2, 10, 624, 625, 1000, 60000])
def test_a_permutation_is_torch_s_of_the_same_seed(num_items: int) -> None:
    for seed in SEEDS if num_items < 60000 else SEEDS[-2:]:
        found = permutation(num_items, seed)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, expected(num_items, seed))


def test_a_long_permutation_is_the_same_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    short = permutation(50, 3)
    monkeypatch.setattr(random, "_LONG", 50)
    np.testing.assert_array_equal(permutation(50, 3), short)
