"""What a latent binary fit achieved: the parts of its bound on all data, and densities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import NumericError
from bnncli.evaluation.density import used_density
from bnncli.evaluation.input_selection import MAX_INPUTS, input_inclusions
from bnncli.latent.fit import Inputs, Scaling, averaged_divergence, draw_logits, leaves
from bnncli.latent.model import bias_divergence
from bnncli.lazy import no_grad, torch
from bnncli.numerics.random import on_device
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.session.run import Run
from bnncli.targets.blocks import FeatureBlocks

if TYPE_CHECKING:
    from torch import Tensor

NUM_PASSES = 8  # over the data, for the expected log likelihood
FLOW_DRAWS = 64  # of multipliers and weights, NUM_PASSES at once


class TrainingData(NamedTuple):
    """What a fit is measured on: features (N, D) wherever they lie, labels (N,) on the device, and how inputs are scaled."""

    features: Tensor
    labels: Tensor
    scaling: Scaling | None

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs of the network (n, D) and their labels (n,), block by block."""
        for rows, inputs in Inputs(FeatureBlocks(self.features, self.labels.device), self.scaling).blocks():
            yield inputs, self.labels[rows]


@no_grad
def measure(run: Run, posterior: LatentBinary, data: TrainingData, *, variance: str, estimator: str) -> dict[str, Any]:
    """The bound of the best repeat on all data, part by part, nats, and the density of its layers.

    The expected log likelihood is that under exact draws of the weights; beside it, where activations were drawn in
    training, that under such draws: their difference is what the Gaussian approximation of activations is off. The flow's
    part is of exact draws too.
    """
    model, best = posterior.model, posterior.best
    generator = on_device(run.stream("fit-lbbnn/bound"), run.device)
    exact = _by_weights(run, posterior, data, generator)
    metrics: dict[str, Any] = {"estimator": estimator, "expected_log_likelihood": _estimate(exact)}
    if estimator != "concrete":
        drawn = _by_activations(run, posterior, data, variance, generator)
        metrics["expected_log_likelihood_of_activations"] = _estimate(drawn)
    weight = averaged_divergence(model, generator)[best]
    factors = model.factors
    bias = bias_divergence(factors.bias_mean, factors.bias_rho, model.prior, model.layout)[best].double()
    flows = _flow_divergences(run, posterior, generator)
    flow = flows.sum(dim=0) / max(1, len(flows))
    parts = zip(weight.tolist(), bias.tolist(), flow.tolist(), strict=True)
    metrics["divergence"] = [{"weights": w, "biases": b, "flow": f} for w, b, f in parts]
    total = float(weight.sum() + bias.sum() + flow.sum())
    value = metrics["expected_log_likelihood"]["value"] - total
    if not math.isfinite(value):
        raise NumericError("the bound is not finite", hint="use a smaller --learning-rate")
    error = metrics["expected_log_likelihood"]["standard_error"]
    if len(flows):
        error = math.hypot(error, _estimate(flows.sum(dim=1))["standard_error"])
    metrics["bound"] = {"value": value, "standard_error": error}
    metrics |= densities(posterior)
    if model.layout.sizes[1:] == (1,) and model.layout.num_features <= MAX_INPUTS:
        metrics["inputs"] = input_inclusions(factors.inclusion.detach())
    metrics["prior_inclusion"] = model.prior.inclusion[min(best, len(model.prior.inclusion) - 1)].tolist()
    metrics["slab_sd"] = model.prior.slab_sd[min(best, len(model.prior.slab_sd) - 1)].tolist()
    return metrics


def densities(posterior: LatentBinary) -> dict[str, Any]:
    """Share of the weights that are in, of each layer and of all: expected, and of the median probability model."""
    layout, logit = posterior.model.layout, posterior.model.factors.logit[posterior.best].detach()
    views = layout.weights(logit)
    expected, *by_layer = [row["value"] for row in used_density([torch.sigmoid(view) for view in views])]
    median, *median_by_layer = [row["value"] for row in used_density([view > 0 for view in views])]
    return {
        "density": expected,
        "density_by_layer": by_layer,
        "median_density": median,
        "median_density_by_layer": median_by_layer,
        "num_weights": [view.numel() for view in views],
    }


def _by_weights(run: Run, posterior: LatentBinary, data: TrainingData, generator: torch.Generator) -> Tensor:
    """Log likelihood of all data (S,) under exact draws of the weights."""
    model = posterior.model
    repeats = torch.full((NUM_PASSES,), posterior.best, device=model.device)
    theta = model.layout.join(*model.draw_weights(repeats, generator))
    total = torch.zeros(NUM_PASSES, dtype=torch.float64, device=model.device)
    for features, labels in data.blocks():
        logits = model.layout.logits(features, theta)
        total += model.layout.likelihood.log_likelihoods(logits, labels).sum(dim=1)
        run.console.poll()
    return total


def _by_activations(
    run: Run, posterior: LatentBinary, data: TrainingData, variance: str, generator: torch.Generator
) -> Tensor:
    """The same under drawn activations."""
    model = posterior.model.of_repeats(
        slice(posterior.best, posterior.best + 1)
    )  # of all repeats at once there may be no room
    weight = leaves(model, variance)
    total = []
    for _ in range(NUM_PASSES):
        one = torch.zeros((), dtype=torch.float64, device=model.device)
        for features, labels in data.blocks():
            logits = draw_logits(model, features, weight, generator)
            one += model.layout.likelihood.log_likelihoods(logits, labels).sum(dim=1)[0]
            run.console.poll()
        total.append(one)
    return torch.stack(total)


def _flow_divergences(run: Run, posterior: LatentBinary, generator: torch.Generator) -> Tensor:
    """log q(z) - log r(z | w) of each layer under exact draws of z and w, (FLOW_DRAWS, L) float64; no row without multipliers."""
    model, best = posterior.model, posterior.best
    parts = [part.at(best) for part in model.multipliers]
    repeats = torch.full((NUM_PASSES,), best, device=model.device)
    found = []
    for _ in range(FLOW_DRAWS // NUM_PASSES if parts else 0):
        sizes = [(1, NUM_PASSES, inputs) for _, inputs in model.layout.shapes]
        noises = [torch.randn(size, generator=generator, device=generator.device).to(model.device) for size in sizes]
        draws = [part.draw(noise) for part, noise in zip(parts, noises, strict=True)]
        weights, _ = model.draw_weights(repeats, generator, [z[0] for z, _ in draws])
        views = model.layout.weights(weights)
        found.append(
            torch.stack(
                [
                    log_q - part.log_auxiliary_at(z, (view @ part.readout[0]).unsqueeze(0))
                    for part, (z, log_q), view in zip(parts, draws, views, strict=True)
                ],
                dim=2,
            )[0].double()
        )
        run.console.poll()
    return torch.cat(found) if found else torch.zeros(0, model.layout.num_layers, dtype=torch.float64)


def _estimate(values: Tensor) -> dict[str, float]:
    return {"value": float(values.mean()), "standard_error": float(values.std()) / math.sqrt(len(values))}
