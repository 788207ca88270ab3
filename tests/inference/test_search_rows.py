"""Which examples a search for the prior precision reads, and what a search of a part leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from problems.heads import at_random, by_noisy_sign, draw_examples, gaussian_at_mode, head_target
from problems.seeds import normal, seeded

from bnncli.inference.mode import default_tolerance, find_mode, tolerance_factor
from bnncli.inference.prior_criterion import Criterion, losses_by_logits
from bnncli.inference.prior_search import Candidates, SearchRows, is_brief, search, search_rows, search_size
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_small_problems_are_searched_by_all_examples() -> None:
    sizes = {"num_params": 850, "num_outputs": 10, "device": CPU}
    rows = search_rows(60_000, 10_000, **sizes, generator=seeded(0))
    assert rows == SearchRows(None, None)
    assert search_size(60_000, **sizes) == 60_000


def test_large_ones_by_rows_drawn_without_replacement_as_the_seed_says() -> None:
    sizes = {"num_params": 1_281_000, "num_outputs": 1000, "device": CPU}
    rows, again, other = (search_rows(100_000, 10_000, **sizes, generator=seeded(seed)) for seed in (0, 0, 1))
    for found, same, different, total in (
        (rows.train, again.train, other.train, 100_000),
        (rows.val, again.val, other.val, 10_000),
    ):
        assert found is not None
        assert same is not None
        assert different is not None
        assert len(found.unique()) == len(found) < total / 2
        assert found.equal(found.sort().values)
        assert int(found[0]) >= 0
        assert int(found[-1]) < total
        assert found.equal(same)
        assert not found.equal(different)
        middle = float(found.double().mean() / total)  # of a uniform draw, sd 1 / sqrt(12 n)
        assert abs(middle - 0.5) < 5 / math.sqrt(12 * len(found))
    assert rows.train is not None
    assert len(rows.train) == search_size(100_000, **sizes)


def test_a_search_reads_ten_examples_of_an_output_at_least_and_more_on_a_gpu() -> None:
    huge = {"num_params": 20_000_000, "num_outputs": 10_000}
    assert search_size(10**7, **huge, device=CPU) == 100_000
    assert search_size(10**7, **huge, device=CUDA) == 100_000
    large = {"num_params": 2_049_000, "num_outputs": 1000}
    assert search_size(1_280_000, **large, device=CPU) < search_size(1_280_000, **large, device=CUDA)


def test_a_search_by_all_examples_is_brief_where_its_modes_take_seconds() -> None:
    assert not is_brief(11_300, num_params=7_700, device=CPU)
    assert not is_brief(60_000, num_params=850, device=CPU)
    assert is_brief(32_000, num_params=51_225, device=CPU)
    assert not is_brief(32_000, num_params=51_225, device=CUDA)


def test_a_search_of_a_large_head_leaves_precisions_out_and_finds_the_same() -> None:
    layout = HeadLayout(3, 4)
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    held_out = target.held_out(*draw_examples(layout, 200, labels=by_noisy_sign, seed=1))

    def found(start: torch.Tensor, *, is_large: bool) -> tuple[float, list[float]]:
        result = search(
            target, start=start, generator=seeded(7), structure="full", criterion="val",
            held_out=held_out, bounds=(1e-6, 1e5), tolerance=0.0, is_large=is_large,
        )  # fmt: skip
        return result.best, [key for key, _ in result.curve]

    best, whole = found(torch.zeros(layout.num_params), is_large=False)
    for own in (1e-3, 1.0, 1e4):  # the precision that the start is the mode of
        start = find_mode(target.with_prior(Prior(own)), torch.zeros(layout.num_params)).theta
        again, part = found(start, is_large=True)
        assert again == pytest.approx(best, rel=0.3)  # other draws
        assert len(part) < len(whole)
        # Where it began, one beyond the lowest, and one beyond its beginning where it went the wrong way first.
        assert min(part) == pytest.approx(min(own, 0.1), rel=0.02)
        assert max(part) == pytest.approx(10.0 if own < 10 else 10 * own, rel=0.02)


def test_the_checkpoints_own_precision_is_that_of_which_it_is_the_mode() -> None:
    layout = HeadLayout(3, 4)
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    start = find_mode(target.with_prior(Prior(17.0)), torch.zeros(layout.num_params)).theta
    criterion = Criterion(normal(2, layout.num_params), None)
    candidates = Candidates(target, "kron", "mode", criterion, start, 0.0, SILENT.task("", 1))
    assert math.exp(candidates.own_log_precision) == pytest.approx(17.0, rel=1e-3)


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("layout", [HeadLayout(3, 4), HeadLayout(1, 4, has_bias=False)], ids=str)
def test_losses_by_logits_are_those_by_draws_of_theta(structure: str, layout: HeadLayout) -> None:
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    held_out = target.held_out(*draw_examples(layout, 30, labels=by_noisy_sign, seed=1))
    gaussian = gaussian_at_mode(target, structure)
    num_draws, parts = 100_000, 20
    size = num_draws // parts

    def probabilities(draw: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean (M,) over the parts, and its standard error."""
        found = torch.stack([torch.exp(-draw(seed)) for seed in range(parts)])
        return found.mean(dim=0), found.std(dim=0) / parts**0.5

    def by_logits(seed: int) -> torch.Tensor:
        noise = normal(size, layout.num_outputs, seed=seed)
        return losses_by_logits(held_out, target, gaussian.mean, gaussian.covariance, noise=noise)

    def by_theta(seed: int) -> torch.Tensor:
        return held_out.losses(gaussian.sample(size, seeded(100 + seed)))

    (one, error), (other, its_error) = probabilities(by_logits), probabilities(by_theta)
    assert ((one - other).abs() < 5 * (error.square() + its_error.square()).sqrt()).all()
    plug_in = torch.exp(-held_out.losses(gaussian.mean.unsqueeze(0)))
    assert ((one - plug_in).abs() > 5 * error).any()  # draws do move it


def test_losses_of_many_draws_and_classes_are_made_in_blocks() -> None:
    layout = HeadLayout(40, 6)
    target = head_target(layout, 50, prior=1.0, labels=at_random)
    theta = normal(300, layout.num_params, seed=1)
    log_probs = torch.log_softmax(layout.logits(target.features, theta).double(), dim=2)
    expected = -(log_probs[:, torch.arange(50), target.labels].logsumexp(dim=0) - math.log(300))
    torch.testing.assert_close(
        target.held_out(target.features, target.labels).losses(theta), expected, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("num_params", "factor"), [(850, 1.0), (10_000, 1.0), (1_000_000, 10.0)])
def test_the_tolerance_of_a_mode_grows_as_the_number_of_parameters(num_params: int, factor: float) -> None:
    assert tolerance_factor(num_params) == pytest.approx(factor)


def test_a_mode_is_as_near_as_its_default_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = HeadLayout(3, 4)
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    start = torch.zeros(layout.num_params)
    exact = find_mode(target, start)
    assert exact.newton_decrement <= 1e-3
    monkeypatch.setattr("bnncli.inference.mode.tolerance_factor", lambda num_params: 1e3)
    assert default_tolerance(100_000) == pytest.approx(1.0)
    assert default_tolerance(1_281_000) == pytest.approx(0.1)
    rough = find_mode(target, start)
    assert rough.num_iterations < exact.num_iterations
    assert 1e-3 < rough.newton_decrement <= 1.0
