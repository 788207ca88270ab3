"""What evaluate says of a latent binary network besides its predictions: density, inclusions, and the curve of pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bnncli.evaluation.calibration import calibration_scores, pooled_calibration
from bnncli.evaluation.density import density_rows, density_thresholds, inclusion_histogram, used_density
from bnncli.evaluation.example_statistics import examples_of
from bnncli.evaluation.input_selection import selection_rows
from bnncli.evaluation.label_scores import decision_scores
from bnncli.evaluation.metric_rows import Row, score_rows
from bnncli.evaluation.scores import accuracy_nll_brier, input_numbers
from bnncli.evaluation.weighted_scores import ScoreGroup
from bnncli.integrators import load_integrator
from bnncli.integrators.plug_in import PlugIn
from bnncli.lazy import torch
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.sparse import Sparse
from bnncli.session.inputs import load_split, open_posterior
from bnncli.session.run import Run

DRAWN_NETWORKS = 10  # whose shares of weights are told


def density_metrics(run: Run, path: Path, integrator: str) -> tuple[list[Row], list[Row]]:
    """Metric rows of the density, first that of the networks that the integrator predicts with; histograms of the inclusion
    probabilities of each layer, none for a sparse network."""
    posterior = open_posterior(path)[0]
    used = used_density(_used(posterior, integrator))
    if isinstance(posterior, Sparse):
        return used, []
    rows, histograms = _inclusions(run, posterior)
    return used + rows, histograms


def _used(posterior: LatentBinary | Sparse, integrator: str) -> list[torch.Tensor]:
    """Of each layer's weights, the probability of being in the networks that an integrator predicts with."""
    if isinstance(posterior, Sparse):
        return [(weight != 0).double() for weight, _ in posterior.network.split(posterior.theta)]
    layout, needs = posterior.model.layout, load_integrator(integrator).needs
    if needs == "sample":  # of all repeats in turn
        return layout.weights(posterior.model.factors.inclusion.double().mean(dim=0))
    return [(weight != 0).double() for weight, _ in layout.split(getattr(posterior, needs))]


def _inclusions(run: Run, posterior: LatentBinary) -> tuple[list[Row], list[Row]]:
    """Metric rows of the best repeat's density, and a histogram of the inclusion probabilities of each layer."""
    layout, best = posterior.model.layout, posterior.best
    inclusion = layout.weights(posterior.inclusion)
    drawn = posterior.model.draw_weights(torch.full((DRAWN_NETWORKS,), best), run.stream("evaluate/density"))[0]
    shares = [(part != 0).flatten(1).double().mean(dim=1) for part in layout.weights(drawn)]
    histograms = [{"layer": str(index), **inclusion_histogram(part)} for index, part in enumerate(inclusion)]
    return density_rows(inclusion, shares), histograms


def selection_metrics(path: Path, true_inputs: str | None) -> list[Row]:
    """Metric rows of the inputs that are in, all repeats; none without true inputs."""
    numbers = input_numbers(true_inputs)
    return selection_rows(open_posterior(path)[0].model.factors.inclusion, numbers) if numbers else []


def density_curve(run: Run, path: Path, split_name: str, *, num_bins: int) -> Row | None:
    """Accuracy, NLL and ECE of the networks that are left over above rising inclusion thresholds; None without labels."""
    split = load_split(run, split_name)
    if split.content.labels is None or len(split.content.labels) == 0:
        return None
    posterior: LatentBinary = open_posterior(path)[0].to(run.device)
    network = posterior.model.layout
    inclusion = posterior.inclusion
    curve: dict[str, list[float]] = {name: [] for name in ("threshold", "density", "accuracy", "nll", "ece")}
    for threshold in density_thresholds(inclusion):
        single: Any = Sparse(posterior.pruned(threshold), network)
        parts = [
            PlugIn().predict(single, features, num_samples=None, generator=run.stream("evaluate/density")).probs.cpu()
            for features in split.feature_blocks(run.device)
        ]
        scores = _scores(torch.cat(parts).numpy(), split.content.labels, num_bins)
        rows = score_rows(scores, (split_name, len(split.content.labels)))
        found = {row["name"]: row["value"] for row in reversed(rows)}  # the usual form stands first
        curve["threshold"].append(max(threshold, 0.0))
        curve["density"].append(float((inclusion > threshold).double().mean()))
        for name in ("accuracy", "nll", "ece"):
            curve[name].append(found[name])
        run.console.poll()
    return curve


def _scores(probs: NDArray, labels: NDArray, num_bins: int) -> list[ScoreGroup]:
    """Accuracy, NLL and calibration errors of probs (N, C), the usual form of each first."""
    if labels.ndim == 2:  # several an example
        examples = examples_of(probs, labels, is_exclusive=False)
        return [*decision_scores(probs, examples), pooled_calibration(probs, labels, num_bins=num_bins)]
    examples = examples_of(probs, labels)
    return [*accuracy_nll_brier(examples), *calibration_scores(examples, num_bins=num_bins)]
