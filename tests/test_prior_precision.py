"""The search for the prior precision against direct minimisation."""

import math

import pytest
import scipy.optimize
import torch

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.prior_precision import _parabola_vertex, predictive_nll, search
from bnncli.layout import HeadLayout
from bnncli.targets.last_layer import LastLayerTarget

LAYOUTS = [HeadLayout(3, 4), HeadLayout(1, 4, has_bias=False)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
every_structure = pytest.mark.parametrize("structure", registry.names("covariances"))


def make_data(layout: HeadLayout, seed: int, num_examples: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_examples, layout.num_features, generator=generator, dtype=torch.float64)
    labels = (features[:, 0] + torch.randn(num_examples, generator=generator) > 0).long()
    return features, labels


def make_target(layout: HeadLayout) -> LastLayerTarget:
    return LastLayerTarget(*make_data(layout, 0), layout, 1.0)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@every_layout
def test_predictive_nll_is_the_average_over_draws_and_examples(layout: HeadLayout) -> None:
    features, labels = make_data(layout, 1)
    theta = torch.randn(6, layout.num_params, generator=seeded(), dtype=torch.float64)
    total = 0.0
    for x, label in zip(features, labels, strict=True):
        logits = layout.logits(x[None], theta)[:, 0]
        if layout.num_outputs == 1:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
        total -= math.log(logits.softmax(dim=1).mean(dim=0)[label])
    assert predictive_nll(features, labels, theta, layout) == pytest.approx(total / 40, rel=1e-12)


@every_structure
@every_layout
def test_marglik_search_finds_the_maximum_of_the_evidence(structure: str, layout: HeadLayout) -> None:
    target, start = make_target(layout), torch.zeros(layout.num_params)

    def loss(log_precision: float) -> float:
        at = target.with_prior_precision(math.exp(log_precision))
        return -fit_gaussian(at, start=start, structure=structure).log_marginal_likelihood

    expected = scipy.optimize.minimize_scalar(loss, bounds=(-4, 11), method="bounded").x
    found = search(target, start=start, generator=seeded(), structure=structure, criterion="marglik")
    assert math.log(found.best) == pytest.approx(expected, abs=0.07)
    assert not found.at_edge


@every_layout
def test_val_search_finds_the_lowest_validation_nll(layout: HeadLayout) -> None:
    target, start = make_target(layout), torch.zeros(layout.num_params)
    features, labels = make_data(layout, 1, num_examples=400)
    found = search(target, start=start, generator=seeded(), val_features=features, val_labels=labels)
    noise = torch.randn(128, layout.num_params, generator=seeded(), dtype=torch.float64)

    def loss(log_precision: float) -> float:
        fit = fit_gaussian(target.with_prior_precision(math.exp(log_precision)), start=start)
        return predictive_nll(features, labels, fit.gaussian.from_noise(noise)[0], layout)

    best_on_grid = min(loss(-3 + 0.1 * i) for i in range(100))
    assert loss(math.log(found.best)) < best_on_grid + 1e-4
    assert dict(found.curve)[found.best] == pytest.approx(loss(math.log(found.best)), abs=1e-5)


def test_curve_is_sorted_and_best_is_its_lowest() -> None:
    found = search(make_target(LAYOUTS[0]), start=torch.zeros(15), generator=seeded(), criterion="marglik")
    assert [key for key, _ in found.curve] == sorted(key for key, _ in found.curve)
    assert found.best == min(found.curve, key=lambda pair: pair[1])[0]
    assert found.curve[0][0] == pytest.approx(1e-2)
    assert found.curve[-1][0] == pytest.approx(1e5)


def test_center_of_the_search_is_the_mode_at_the_best() -> None:
    target = make_target(LAYOUTS[0])
    found = search(target, start=torch.zeros(15), generator=seeded(), criterion="marglik")
    again = fit_gaussian(target.with_prior_precision(found.best), start=found.center)
    assert again.mode is not None
    assert again.mode.num_iterations == 0


@pytest.mark.parametrize(("bounds", "best"), [((1e3, 1e5), 1e3), ((1e-5, 1e-3), 1e-3), ((2.0, 2.0), 2.0)])
def test_a_best_at_the_end_of_the_grid_is_told(bounds: tuple[float, float], best: float) -> None:
    found = search(
        make_target(LAYOUTS[0]),
        start=torch.zeros(15),
        generator=seeded(),
        criterion="marglik",
        bounds=bounds,
    )
    assert found.at_edge
    assert found.best == pytest.approx(best)


def test_a_parabola_gives_its_vertex() -> None:
    values = {x: 3 * (x - 0.7) ** 2 + 1 for x in (-1.0, 0.5, 1.5)}
    assert _parabola_vertex(values, 0.5) == pytest.approx(0.7)
    assert _parabola_vertex(values, -1.0) == -1.0


def test_val_without_validation_data_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a labelled val split"):
        search(make_target(LAYOUTS[0]), start=torch.zeros(15), generator=seeded())
