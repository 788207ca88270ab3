"""Leave-one-out losses at a mode against algebra of the whole precision, exact refits, and what fit-laplace makes of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.heads import draw_examples, head_target
from problems.seeds import antithetic, seeded
from torch import Tensor

import bnncli.commands.fit_laplace as stage
from bnncli import registry
from bnncli.inference import prior_criterion
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.prior_criterion import LeftOutExamples, leave_one_out_logits, left_out_losses
from bnncli.inference.prior_search import search
from bnncli.likelihoods import MULTILABEL
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import HeldOutFeatures, LastLayerTarget


def by_features(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    """Classes, or several labels an example, that the features tell with noise."""
    noise = torch.randn(len(features), layout.num_classes, generator=generator, dtype=features.dtype)
    scores = features[:, : layout.num_classes] + noise
    return (scores > 0).to(torch.uint8) if not layout.likelihood.is_exclusive else scores.argmax(dim=1)


LAYOUTS = [HeadLayout(3, 4), HeadLayout(1, 4, has_bias=False), HeadLayout(3, 4, likelihood_name=MULTILABEL)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
make_target = partial(head_target, num_examples=40, labels=by_features)


def without(target: LastLayerTarget, row: int) -> LastLayerTarget:
    return target.some(torch.tensor([place for place in range(target.num_examples) if place != row]))


@every_layout
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_logits_without_an_example_are_a_newton_step_of_all_others(layout: HeadLayout, scale: float) -> None:
    target = make_target(layout, likelihood_scale=scale)
    fit = fit_gaussian(target, start=torch.zeros(layout.num_params))
    theta, mean = fit.gaussian.mean, fit.gaussian.logit_moments(target.features)
    found = leave_one_out_logits(*mean, target.labels, layout.likelihood, scale=scale)
    for row in range(0, 40, 7):
        others = without(target, row)
        _, gradient = others.log_joint_and_grad(theta.unsqueeze(0))
        jacobian = layout.jacobian(target.features[row : row + 1])[0]
        precision = -torch.func.hessian(lambda at, others=others: others_log_joint(others, at))(theta)
        covariance = torch.linalg.inv(precision)
        expected = layout.logits(target.features[row : row + 1], (theta + covariance @ gradient[0]).unsqueeze(0))[0, 0]
        torch.testing.assert_close(
            found[0][row], expected, rtol=1e-3, atol=1e-3
        )  # the mode is as near to the exact one
        torch.testing.assert_close(found[1][row], jacobian @ covariance @ jacobian.T, rtol=1e-6, atol=1e-8)


def others_log_joint(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """The log joint by autograd's own rules."""
    logits = target.layout.logits(target.features, theta.unsqueeze(0))
    own = target.layout.likelihood.log_likelihoods(logits, target.labels).sum()
    return target.likelihood_scale * own - 0.5 * target.prior.weight_precision * theta.square().sum()


@every_layout
def test_losses_are_nearly_those_of_exact_refits(layout: HeadLayout) -> None:
    target = make_target(layout, prior=0.5)
    fit = fit_gaussian(target, start=torch.zeros(layout.num_params))
    noise = antithetic(2000, layout.num_outputs, seed=3)
    held_out = LeftOutExamples.of(target, seeded(0))
    found = left_out_losses(held_out, target, fit.gaussian.mean, fit.gaussian.covariance, noise=noise)
    inside = HeldOutFeatures(target.features, target.labels, layout)
    normal = torch.randn(4000, layout.num_params, generator=seeded(1), dtype=torch.float64)
    expected = []
    for row in range(40):
        gaussian = fit_gaussian(without(target, row), start=fit.gaussian.mean).gaussian
        own = HeldOutFeatures(target.features[row : row + 1], target.labels[row : row + 1], layout)
        expected.append(own.losses(gaussian.mean + gaussian.covariance.unwhiten(normal)))
    exact = torch.cat(expected)
    gap = float(exact.mean() - inside.losses(fit.gaussian.mean + fit.gaussian.covariance.unwhiten(normal)).mean())
    assert gap > 0.01  # what an example's own label makes of its loss
    assert abs(float(found.mean() - exact.mean())) < 0.15 * gap
    assert float(torch.corrcoef(torch.stack([found, exact]))[0, 1]) > 0.99


@pytest.mark.long
@pytest.mark.parametrize("structure", registry.names("curvature"))
def test_a_search_finds_the_least_loss_of_a_grid(structure: str) -> None:
    layout = LAYOUTS[0]
    target, held_out = make_target(layout), LeftOutExamples.of(make_target(layout), seeded(0))
    common = {"start": torch.zeros(layout.num_params), "structure": structure}
    found = search(target, generator=seeded(7), criterion="loo", held_out=held_out, **common)
    losses = {}
    for precision in np.geomspace(0.01, 1000, 26):
        tried = target.with_prior(Prior(float(precision)))
        fit = fit_gaussian(tried, **common)
        noise = found.judge.noise
        each = left_out_losses(held_out, tried, fit.gaussian.mean, fit.gaussian.covariance, noise=noise)
        losses[precision] = float(each.mean())
    assert dict(found.curve)[found.best] <= min(losses.values()) + 1e-4
    assert found.criterion == "loo"


def test_many_examples_are_told_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior_criterion, "MOST_ROWS", 15)
    target = make_target(LAYOUTS[0])
    held_out = LeftOutExamples.of(target, seeded(0))
    assert (len(held_out.features), len(held_out.labels)) == (15, 15)
    rows = [int((target.features == row).all(dim=1).nonzero()) for row in held_out.features]
    assert rows == sorted({*rows})
    assert torch.equal(held_out.labels, target.labels[rows])


def small_arrays(num_train: int, num_features: int, *, num_classes: int = 3) -> dict[str, np.ndarray]:
    """Features that tell classes with noise, and a head without any."""
    layout = HeadLayout(num_classes, num_features)
    found: dict[str, np.ndarray] = {}
    for seed, (split, size) in enumerate((("train", num_train), ("test", 500))):
        features, labels = draw_examples(layout, size, by_features, seed=seed)
        found |= {f"features_{split}": features.float().numpy(), f"labels_{split}": labels.numpy()}
    head = {
        "head_weight": np.zeros((num_classes, num_features), np.float32),
        "head_bias": np.zeros(num_classes, np.float32),
    }
    return found | head


@pytest.mark.long
@pytest.mark.parametrize("num_features", [12, 60])
def test_without_val_it_is_the_default_and_predicts_better_than_by_evidence(
    cli: Cli, tmp_path: Path, num_features: int
) -> None:
    run = new_run(cli, tmp_path / "run", small_arrays(40, num_features))
    done = cli("fit-laplace", run, "--json")
    assert done.code == 0, done.stderr
    metrics = done.json["metrics"]
    assert metrics["prior_precision_by"] == "loo"
    assert any("by leave-one-out on train" in text for text in done.json["warnings"])
    assert cli("fit-laplace", run, "--prior-precision", "loo", "--name", "asked").code == 0
    assert cli("fit-laplace", run, "--prior-precision", "marglik", "--name", "evidence").code == 0
    assert cli("predict", run).code == 0
    rows = cli("evaluate", run, "--bootstrap", 0, "--json").json["rows"]
    nll = {row["posterior"]: m["value"] for row in rows for m in row["metrics"] if m["name"] == "nll"}
    assert nll["laplace"] == nll["asked"] < nll["evidence"] + 0.005
    assert cli("status", run, "--check").code == 0


def test_of_many_outputs_the_evidence_chooses(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(cli, tmp_path / "run", small_arrays(40, 6))
    monkeypatch.setattr(stage, "MOST_LEFT_OUT", 2)  # of fewer outputs than there are
    done = cli("fit-laplace", run, "--json").json
    assert done["metrics"]["prior_precision_by"] == "marglik"
    refused = cli("fit-laplace", run, "--prior-precision", "loo", "--name", "asked")
    assert (refused.code, "expected at most 2 outputs; the head has 3" in refused.stderr) == (2, True)


@pytest.mark.parametrize("words", [("--center", "checkpoint"), ("--layers", "all"), ("--fit-on", "val")])
def test_where_no_example_can_be_left_out_it_is_refused(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    run = new_run(cli, tmp_path / "run", small_arrays(40, 6))
    done = cli("fit-laplace", run, "--prior-precision", "loo", *words)
    assert (done.code, "--prior-precision loo is for --layers last at --center mode" in done.stderr) == (2, True)
