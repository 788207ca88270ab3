"""Heads of plain torch against the integrators that they repeat: every integrator, covariance and likelihood."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from problems.heads import ONE, THREE, TWO, at_random, gaussian_at_mode, head_target
from torch import Tensor

from bnncli.commands.export import EXPORTED_SCORES
from bnncli.errors import UsageError
from bnncli.evaluation.feature_scores import FittedViews
from bnncli.export import parts as exported_parts
from bnncli.export import parts as spreads
from bnncli.export.parts import HeadParts, add_combined_score, add_ood_score, add_sets, head_parts, thin_to_budget
from bnncli.integrators import Integrator, Prediction, load_integrator
from bnncli.integrators._moments import energy_and_max_logit
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.registry import names
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget

pytestmark = pytest.mark.libraries

LABELS = HeadLayout(3, 4, likelihood_name="multilabel")
LAYOUTS = [ONE, TWO, THREE, HeadLayout(3, 4, has_bias=False), LABELS]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "probit": [{}, {"projection": "sum-zero"}],
    "mean-field": [{}, {"projection": "none"}, {"order": 1}],
    "bridge": [{}, {"projection": "none"}, {"normalize": True}],
    "mc": [{}, {"qmc": True}],
    "quadrature": [{}, {"rule": "gauss-hermite"}],
}
PRIORS = [Prior(0.3), Prior(0.3, 2.0)]


def labels_of(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    if layout.likelihood.is_exclusive:
        return at_random(features, layout, generator)
    return torch.randint(2, (len(features), layout.num_classes), generator=generator).to(torch.uint8)


def fitted(layout: HeadLayout, structure: str, prior: Prior = PRIORS[0]) -> tuple[LastLayerTarget, Gaussian[Any]]:
    target = head_target(layout, labels=labels_of, prior=prior)
    return target, gaussian_at_mode(target, structure)


def prepared(integrator: Integrator, posterior: Any, target: Any = None, num_samples: int = 50) -> Any:
    generator = torch.Generator().manual_seed(2)
    ready: Any = integrator.prepare(posterior, num_samples=num_samples, generator=generator, target=target)
    return thin_to_budget(ready, num_samples, generator)


def both(
    name: str, posterior: Any, *, target: Any = None, count: int = 7, **settings: Any
) -> tuple[dict[str, Tensor], Prediction]:
    """What the exported head gives for standard normal features three times as large, and what the integrator does."""
    integrator = load_integrator(name, **settings)
    ready = prepared(integrator, posterior, target)
    features = 3 * torch.randn(count, posterior.layout.num_features, generator=torch.Generator().manual_seed(5))
    found = add_ood_score(head_parts(posterior, integrator, ready), "max_prob", posterior.layout, posterior.center)
    with torch.no_grad():
        outputs = found.module()(features)
    expected = ready.predict(posterior, features, num_samples=50, generator=torch.Generator().manual_seed(2))
    return outputs, expected


def assert_same(outputs: dict[str, Tensor], expected: Prediction, *, tolerance: float = 3e-6) -> None:
    assert (outputs["probs"] - expected.probs).abs().max() < tolerance
    assert (outputs["entropy"] - expected.entropy).abs().max() < 3 * tolerance
    assert ("mutual_information" in outputs) == (expected.mutual_info is not None)
    if expected.mutual_info is not None:
        assert (outputs["mutual_information"] - expected.mutual_info).abs().max() < 3 * tolerance


def does(name: str, layout: HeadLayout) -> bool:
    integrator = load_integrator(name)
    if not layout.likelihood.is_exclusive:
        return integrator.takes_labels and name != "bridge"
    return layout.num_classes <= integrator.max_classes


CASES = [
    pytest.param(name, settings, structure, layout, id=f"{name}-{settings}-{structure}-{layout}")
    for name in names("integrators")
    for settings, structure, layout in product(SETTINGS.get(name, [{}]), names("curvature"), LAYOUTS)
    if does(name, layout) and name != "mean" and ((name, structure) != ("logit-mc", "full") or layout is ONE)
]


@pytest.mark.parametrize(("name", "settings", "structure", "layout"), CASES)
def test_a_head_gives_what_its_integrator_does(
    name: str, settings: dict[str, Any], structure: str, layout: HeadLayout
) -> None:
    for prior in PRIORS:
        target, posterior = fitted(layout, structure, prior if layout.has_bias else PRIORS[0])
        assert_same(*both(name, posterior, target=target, **settings))


def test_every_integrator_is_exported_or_says_what_is() -> None:
    """Those of the tables are all that there are; what cannot be written down names an integrator that can."""
    assert {name for name in names("integrators") if type(load_integrator(name)) not in exported_parts.MAKERS} == set()
    for name, settings, layout, structure in (
        ("mean-field", {"order": 2}, THREE, "kron"),
        ("bridge", {"projection": "conditional"}, THREE, "kron"),
        ("bridge", {}, LABELS, "kron"),
        ("logit-mc", {}, THREE, "full"),
    ):
        with pytest.raises(UsageError, match="cannot be exported") as caught:
            both(name, fitted(layout, structure)[1], **settings)
        assert "\0integrator\0" in str(caught.value.hint)


def test_variances_too_large_for_a_file_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreads, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match="variances of 3 logits over 4 features would need 0 KiB"):
        both("probit", fitted(THREE, "full")[1])


@pytest.mark.parametrize("name", ["plug-in", "probit", "bridge", "mc", "logit-mc"])
@pytest.mark.parametrize("layout", [ONE, TWO, THREE], ids=str)
def test_a_point_has_no_variance(name: str, layout: HeadLayout) -> None:
    assert_same(*both(name, Point(torch.randn(layout.num_params, dtype=torch.float64), layout)))


def test_two_logits_are_one_difference() -> None:
    assert_same(*both("probit", fitted(TWO, "full")[1], projection="difference"))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_bridge_is_right_for_tiny_and_huge_variances(scale: float) -> None:
    """Where float32 has next to no digits of the concentration left, the mutual information goes to 0, or the entropy."""
    posterior = fitted(THREE, "diag")[1]
    covariance = Diag(posterior.covariance.variances * scale)
    outputs, expected = both("bridge", Gaussian(posterior.mean, covariance, posterior.layout))
    assert_same(outputs, expected, tolerance=1e-5)


@pytest.mark.parametrize("layout", [ONE, THREE, HeadLayout(3, 4, has_bias=False)], ids=str)
def test_scores_of_the_centre_are_those_of_predict(layout: HeadLayout) -> None:
    posterior = fitted(layout, "kron", PRIORS[0])[1]
    integrator, features = load_integrator("probit"), 3 * torch.randn(9, 4)
    energy, max_logit = energy_and_max_logit(features, posterior.mean, layout)
    for name, expected in (("energy", energy), ("max_logit", -max_logit)):
        found = add_ood_score(head_parts(posterior, integrator, integrator), name, layout, posterior.mean)
        assert torch.allclose(found.module()(features)["ood_score"], expected, atol=1e-5)


def test_every_score_of_the_option_is_a_detector_with_its_sign_turned() -> None:
    from bnncli.evaluation import detectors

    assert set(EXPORTED_SCORES) == {*exported_parts.SCORES, "combined"}
    assert set(EXPORTED_SCORES) <= set(detectors.prediction_detectors())
    outputs, expected = both("mc", fitted(THREE, "kron")[1])
    assert torch.allclose(outputs["ood_score"], -expected.probs.amax(1), atol=1e-6)
    for name, wanted in (("entropy", expected.entropy), ("mutual_info", expected.mutual_info)):
        integrator, posterior = load_integrator("mc"), fitted(THREE, "kron")[1]
        parts = head_parts(posterior, integrator, prepared(integrator, posterior))
        features = 3 * torch.randn(7, 4, generator=torch.Generator().manual_seed(5))
        found = add_ood_score(parts, name, THREE, posterior.mean).module()(features)
        assert torch.allclose(found["ood_score"], wanted, atol=1e-5)


@pytest.mark.parametrize("layout", [ONE, THREE, HeadLayout(3, 4, has_bias=False), LABELS], ids=str)
@pytest.mark.parametrize("has_labels", [True, False])
def test_the_combined_score_is_that_of_predict(layout: HeadLayout, has_labels: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    train, labels = torch.randn(400, 4, generator=generator), torch.arange(400) % 3
    train[:, :3] += 3 * torch.nn.functional.one_hot(labels, 3)
    theta = torch.randn(layout.num_params, generator=generator, dtype=torch.float64)
    detector = FittedViews.fit(
        train[:300], labels[:300] if has_labels else None, train[300:], layout=layout, theta=theta,
        device=torch.device("cpu"), generator=generator,
    )  # fmt: skip
    posterior, features = Point(theta, layout), 3 * torch.randn(200, 4, generator=generator)
    features[0] = 0
    integrator = load_integrator("plug-in")
    found = add_combined_score(head_parts(posterior, integrator, prepared(integrator, posterior)), detector)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.float16, 0.2)):
        outputs = found.module(dtype=dtype)(features)
        assert torch.allclose(outputs["ood_score"].double(), -detector.scores(features), atol=tolerance, rtol=tolerance)


def test_mutual_information_is_no_score_where_there_is_none() -> None:
    posterior, integrator = fitted(THREE, "kron")[1], load_integrator("probit")
    with pytest.raises(UsageError, match="provides no mutual information"):
        add_ood_score(head_parts(posterior, integrator, integrator), "mutual_info", THREE, posterior.mean)


def test_labels_have_no_energy() -> None:
    posterior, integrator = fitted(LABELS, "diag")[1], load_integrator("probit")
    with pytest.raises(UsageError, match="multi-label"):
        add_ood_score(head_parts(posterior, integrator, integrator), "energy", LABELS, posterior.mean)


def naive_set(probs: Tensor, thresholds: Tensor, penalty: Tensor | None) -> list[list[bool]]:
    """By the definitions, a class at a time."""
    found = []
    for row in probs.double().tolist():
        order = sorted(range(len(row)), key=lambda k: -row[k])
        scores = [1 - p for p in row]
        if penalty is not None:
            used = 0.0
            for rank, k in enumerate(order):
                used += row[k]
                scores[k] = used + float(penalty[rank])
        limits = thresholds.expand(len(row)).tolist()
        found.append([score <= limit for score, limit in zip(scores, limits, strict=True)])
    return found


@pytest.mark.parametrize("thresholds", [torch.tensor([0.83]), torch.tensor([0.5, 0.9, 0.7])], ids=["one", "each"])
@pytest.mark.parametrize("penalty", [None, torch.zeros(3), torch.tensor([0.0, 0.1, 0.2])], ids=["lac", "aps", "raps"])
def test_sets_are_those_of_their_definitions(thresholds: Tensor, penalty: Tensor | None) -> None:
    posterior, integrator = fitted(THREE, "kron")[1], load_integrator("probit")
    parts = add_sets(head_parts(posterior, integrator, integrator), thresholds, penalty)
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
    outputs = parts.module()(features)
    assert outputs["set"].dtype == torch.bool
    assert outputs["set"].tolist() == naive_set(outputs["probs"], thresholds, penalty)
    assert 40 < int(outputs["set"].sum()) < 120


def test_halved_tensors_are_near_and_small_ones_and_tiny_numbers_stay_whole() -> None:
    tensors = {
        "drawn_weight": torch.randn(20, 3, 4),
        "directions": torch.full((8, 9), 1e-9),
        "weights": torch.full((100,), 0.01),
        "bias": torch.randn(3),
    }
    halved = HeadParts((), tensors).module(dtype=torch.float16)
    kinds = {name: buffer.dtype for name, buffer in halved.named_buffers()}
    assert [name for name, kind in kinds.items() if kind == torch.float16] == ["drawn_weight"]
    assert float(halved.weights.sum()) == pytest.approx(1)


def test_thinned_draws_are_among_the_draws_and_spread_over_them() -> None:
    posterior = fitted(THREE, "kron")[1]
    drawn = prepared(load_integrator("mc"), posterior, num_samples=1000)
    kept = thin_to_budget(drawn, 100, torch.Generator().manual_seed(1))
    places = [int((drawn.theta == theta).all(1).nonzero()) for theta in kept.theta]
    assert [place // 10 for place in places] == list(range(100))
    assert len({place % 10 for place in places}) == 10  # at a fixed distance repeats or chains would be left out
    assert thin_to_budget(drawn, 1000, torch.Generator()) is drawn
    weighted = replace(drawn, weights=torch.softmax(torch.randn(1000, dtype=torch.float64), 0))
    kept = thin_to_budget(weighted, 100, torch.Generator().manual_seed(1))
    assert float(kept.weights.sum()) == pytest.approx(1)
    assert torch.allclose(kept.weights / kept.weights[0], weighted.weights[places] / weighted.weights[places[0]])
