"""Turn a last-layer posterior and an integrator into steps and tensors: one function per integrator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bnncli.errors import UsageError
from bnncli.evaluation.calibration_maps import CalibrationMap
from bnncli.evaluation.feature_scores import FittedViews
from bnncli.export import steps
from bnncli.export.steps import PortableHead, Step, Values, independent_weights, own_directions, shared_directions
from bnncli.integrators import Integrator, Ready
from bnncli.integrators._partitions import DrawPartition
from bnncli.integrators.bridge import Bridge
from bnncli.integrators.importance import Importance, WeightedMc
from bnncli.integrators.logit_mc import DrawnLogitMc, LogitMc
from bnncli.integrators.mc import DrawnMc, Mc
from bnncli.integrators.mean import Mean
from bnncli.integrators.mean_field import MeanField
from bnncli.integrators.plug_in import PlugIn
from bnncli.integrators.probit import Probit
from bnncli.integrators.quadrature import Quadrature, hermite_nodes
from bnncli.parameters.layouts import HeadLayout
from bnncli.structures import Covariance
from bnncli.structures.block import Block
from bnncli.structures.diag import Diag
from bnncli.structures.full import Full
from bnncli.structures.kron import Kron
from bnncli.structures.logits import root_of_covariances
from bnncli.system.memory import bytes_text

MOST_BYTES = 1 << 30  # for the directions of all logits in one file


def build_variance_step(covariance: Covariance | None, layout: HeadLayout, combination: Tensor) -> tuple[Step, Values]:
    """Return the step that computes variances (B, J) of combinations (J, K) of the logits, and its tensors.

    Args:
        covariance: of the weights (P,); None for zero.

    Raises:
        UsageError: the tensors would be too large.
    """
    if covariance is None or isinstance(covariance, Diag):
        variances = torch.zeros(layout.num_params) if covariance is None else covariance.variances
        weight, bias = _split_bias(combination.square() @ layout.augment(variances.double()), layout)
        return independent_weights, {"weight_variance": weight, "bias_variance": bias}
    if isinstance(covariance, Kron):
        loads = compute_basis_variances(covariance).T @ (combination @ covariance.output_basis.double()).square().T
        return shared_directions, {**compute_feature_rotation(covariance, layout), "loads": loads}
    size = layout.num_features + layout.has_bias
    num_bytes = 4 * len(combination) * size**2
    if num_bytes > MOST_BYTES:
        raise UsageError(
            f"the variances of {len(combination)} logits over {layout.num_features} features would need "
            f"{bytes_text(num_bytes)} in the file",
            hint="use \0integrator\0 mc, whose draws need less",
            code="unsupported_export",
        )
    roots = root_of_covariances(_blocks(covariance, layout, combination)).scale
    rows = roots if layout.has_bias else torch.cat([roots, roots.new_zeros(len(roots), 1, size)], dim=1)
    return own_directions, {"directions": rows[:, :-1], "direction_bias": rows[:, -1]}


def compute_feature_rotation(covariance: Kron, layout: HeadLayout) -> Values:
    """Return the eigenvectors of the features' factor (D, F), and the bias's contribution to each (F,)."""
    basis = covariance.feature_basis.double()
    if not layout.has_bias:
        return {"directions": basis, "direction_bias": basis.new_zeros(len(basis))}
    return {"directions": basis[:-1], "direction_bias": basis[-1] * covariance.bias_unit}


def compute_basis_variances(covariance: Kron) -> Tensor:
    """Return variances (K, F) in the joint eigenbasis."""
    return covariance.scales.double().square()


def _blocks(covariance: Covariance, layout: HeadLayout, combination: Tensor) -> Tensor:
    """Return the covariance (J, F, F) of the weights, bias last, for each combination (J, K)."""
    if isinstance(covariance, Block):
        root = covariance.scale_tril.double()
        return torch.einsum("jk,kab->jab", combination.square(), root @ root.transpose(1, 2))
    return torch.stack([_compute_gram(_rows(covariance, layout, row)) for row in combination])


def _rows(covariance: Covariance, layout: HeadLayout, row: Tensor) -> Tensor:
    """Return the derivatives of a combination (K,) by its weights, times a root of the covariance, (F, P)."""
    if isinstance(covariance, Full):
        root, places = covariance.scale_tril.double(), layout.places(covariance.scale_tril.device)
        return torch.stack([row[k] * root[places[k]] for k in row.nonzero().flatten().tolist()]).sum(dim=0)
    identity = torch.eye(layout.num_features + layout.has_bias, dtype=torch.float64)
    return covariance.pull_back(layout.flatten(row[None, :, None] * identity[:, None, :]))


def _compute_gram(rows: Tensor) -> Tensor:
    return rows @ rows.T


def _split_bias(augmented: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Split into weight columns (J, D) and bias column (J,), zero without bias."""
    if layout.has_bias:
        return augmented[:, :-1], augmented[:, -1]
    return augmented, augmented.new_zeros(len(augmented))


def thin_to_budget(ready: Ready, most: int, generator: torch.Generator) -> Ready:
    """Thin the draws to at most `most`: one at random from each of that many stretches of equal length.

    A fixed stride could take all draws from one repeat or chain. Weights are rescaled to sum to one. Draws of logits
    become the same for all examples.
    """
    if isinstance(ready, DrawnLogitMc):
        ready = replace(ready, is_shared=not ready.is_of_theta)
    count = ready.num_draws
    if count is None or count <= most:
        return ready
    shifts = torch.rand(most, generator=generator, dtype=torch.float64)
    chosen = ((torch.arange(most) + shifts) * count / most).long().clamp_max(count - 1)
    if isinstance(ready, WeightedMc):
        return replace(ready, drawn=_thin_draws(ready.drawn, chosen))
    if isinstance(ready, DrawnMc):
        return _thin_draws(ready, chosen)
    if isinstance(ready, DrawnLogitMc):
        return replace(ready, noise=_take_rows(ready.noise, chosen), groups=DrawPartition.of([most]))
    return ready


def _thin_draws(drawn: DrawnMc, chosen: Tensor) -> DrawnMc:
    changed: dict[str, Any] = {"theta": _take_rows(drawn.theta, chosen), "groups": DrawPartition.of([len(chosen)])}
    if drawn.weights is not None:
        weights = _take_rows(drawn.weights, chosen)
        changed["weights"] = weights / weights.sum()
    return replace(drawn, **changed)


def _take_rows(tensor: Tensor, chosen: Tensor) -> Tensor:
    return tensor[chosen.to(tensor.device)]


# Half-width and nodes of the trapezoid rule in a standard normal: error 1e-7 for deviations up to 60.
_WINDOW, _NODES = 9.0, 1025


_FEW = 64  # numbers; halving fewer saves nothing


@dataclass(frozen=True)
class HeadParts:
    """Steps and tensors of a head.

    Attributes:
        steps: from `features` to the outputs.
        tensors: by the names used in the steps, float64 or float32.
    """

    steps: tuple[Step, ...]
    tensors: Values

    def module(self, *, dtype: torch.dtype = torch.float32) -> PortableHead:
        """Return the module, with tensors stored as float32, or as float16 if that loses almost nothing."""
        stored = {name: _store_tensor(tensor, dtype) for name, tensor in self.tensors.items()}
        return PortableHead(self.steps, stored).eval()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensors in float32."""
        return 4 * sum(tensor.numel() for tensor in self.tensors.values())

    def also(self, step: Step, tensors: Values | None = None) -> HeadParts:
        """Return the parts with one more step."""
        return HeadParts((*self.steps, step), {**self.tensors, **(tensors or {})})


def head_parts(posterior: Any, integrator: Integrator, ready: Ready) -> HeadParts:
    """Return the steps from features to probabilities and entropy, and mutual information if the integrator has it.

    Args:
        posterior: over the last layer, on the CPU.
        ready: the prepared integrator with its draws.

    Raises:
        UsageError: the combination cannot be exported.
    """
    make = MAKERS.get(type(integrator))
    if make is None:
        raise _refusal_error(f"integrator {type(integrator).__name__}", "mc")
    found = make(posterior, integrator, ready)
    is_exclusive = posterior.layout.likelihood.is_exclusive
    return found.also(steps.entropy if is_exclusive else steps.label_entropy)


def _build_point(posterior: Any, integrator: Any, ready: Ready) -> HeadParts:
    theta = posterior.mean_theta if isinstance(integrator, Mean) else posterior.center
    tensors = _weights(posterior.layout, theta, _build_identity(posterior.layout))
    found = HeadParts((steps.certain_logits,), tensors)
    calibration: CalibrationMap | None = getattr(posterior, "calibration", None)
    if calibration is None:
        return found.also(_link(posterior.layout))
    likelihood = posterior.layout.likelihood
    if likelihood.num_outputs < likelihood.num_classes:
        found = found.also(steps.both_logits)
    for step in calibration.steps:
        found = found.also(step)
    return found.also(steps.softmax if likelihood.is_exclusive else steps.labels, dict(calibration.tensors))


def _build_probit(posterior: Any, integrator: Probit, ready: Ready) -> HeadParts:
    layout = posterior.layout
    if layout.likelihood.is_shift_invariant and integrator.projection == "difference":
        return _moments(posterior, _difference()).also(steps.probit).also(steps.two_classes)
    is_projected = layout.likelihood.is_shift_invariant and integrator.projection == "sum-zero"
    combination = _minus_mean(layout) if is_projected else _build_identity(layout)
    return _moments(posterior, combination).also(steps.probit).also(_link(layout))


def _build_mean_field(posterior: Any, integrator: MeanField, ready: Ready) -> HeadParts:
    layout, is_projected = posterior.layout, integrator.projection == "sum-zero"
    if not layout.likelihood.is_shift_invariant:
        return _moments(posterior, _build_identity(layout)).also(steps.probit).also(_link(layout))
    if layout.num_classes == 2 and is_projected:
        return _moments(posterior, _difference()).also(steps.probit).also(steps.two_classes)
    if integrator.order == 2:
        raise _refusal_error(
            "mean-field of order 2, which needs all covariances of the logits,", "mean-field of order 0 or 1"
        )
    combination = _minus_mean(layout) if is_projected else _build_identity(layout)
    step = steps.mean_field if integrator.order == 0 else steps.mean_field_of_pairs
    return _moments(posterior, combination).also(step).also(steps.softmax)


def _build_bridge(posterior: Any, integrator: Bridge, ready: Ready) -> HeadParts:
    layout = posterior.layout
    if not layout.likelihood.is_exclusive:
        raise _refusal_error("bridge with several labels per example", "probit")
    if not layout.likelihood.is_shift_invariant:
        combination = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
    elif integrator.projection == "conditional":
        raise _refusal_error(
            "bridge with \0projection\0 conditional, which needs all covariances of the logits,", "bridge"
        )
    else:
        combination = _minus_mean(layout) if integrator.projection == "marginal" else _build_identity(layout)
    found = _moments(posterior, combination)
    found = found.also(steps.shrink) if integrator.normalize else found
    return found.also(steps.bridge).also(steps.dirichlet)


def _build_draws(posterior: Any, integrator: Any, ready: Any) -> HeadParts:
    drawn: DrawnMc = ready.drawn if isinstance(ready, WeightedMc) else ready
    weight, bias = posterior.layout.split(drawn.theta)
    weights = torch.full((len(weight),), 1 / len(weight)) if drawn.weights is None else drawn.weights
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    tensors = {"drawn_weight": weight, "drawn_bias": bias, "weights": weights}
    return HeadParts((steps.drawn_logits, _average(posterior.layout)), tensors)


def _build_logit_draws(posterior: Any, integrator: LogitMc, ready: Any) -> HeadParts:
    points, layout = ready.noise, posterior.layout
    covariance = getattr(posterior, "covariance", None)
    beside = {"points": points, "weights": torch.full((len(points),), 1 / len(points))}
    if isinstance(covariance, Kron):
        own = {**compute_feature_rotation(covariance, layout), "loads": compute_basis_variances(covariance).T}
        weights = _weights(layout, posterior.center, _build_identity(layout))
        beside["basis"] = covariance.output_basis.double()
        of_moments = HeadParts((steps.mean_logits, steps.shared_directions), {**weights, **own, **beside})
        return of_moments.also(steps.spread_along_basis).also(_average(layout))
    is_single = layout.likelihood.is_exclusive and not layout.likelihood.is_shift_invariant
    if covariance is not None and not isinstance(covariance, Diag | Block) and not is_single:
        raise _refusal_error(
            f"logit-mc with a {covariance.structure} covariance, whose root differs for each input,", "mc"
        )
    found = _moments(posterior, _build_identity(layout))
    return found.also(steps.spread_logits, beside).also(_average(layout))


def _build_quadrature(posterior: Any, integrator: Quadrature, ready: Ready) -> HeadParts:
    layout = posterior.layout
    if integrator.rule == "gauss-hermite":
        points, weights = hermite_nodes(integrator.points)
    else:
        points = torch.linspace(-_WINDOW, _WINDOW, _NODES, dtype=torch.float64)
        weights = torch.softmax(-points.square() / 2, dim=0)
    combination = _difference() if layout.likelihood.is_shift_invariant else _build_identity(layout)
    average = steps.average_two_classes if layout.likelihood.is_exclusive else steps.average_labels
    found = _moments(posterior, combination)
    return found.also(steps.spread_logits, {"points": points[:, None], "weights": weights}).also(average)


MAKERS: Mapping[type, Callable[[Any, Any, Any], HeadParts]] = {
    PlugIn: _build_point,
    Mean: _build_point,
    Probit: _build_probit,
    MeanField: _build_mean_field,
    Bridge: _build_bridge,
    Mc: _build_draws,
    Importance: _build_draws,
    LogitMc: _build_logit_draws,
    Quadrature: _build_quadrature,
}


def add_ood_score(found: HeadParts, score: str, layout: HeadLayout, center: Tensor) -> HeadParts:
    """Add a detector's out-of-distribution score under its name; higher is farther from the training data.

    Args:
        center: theta (P,) at the posterior's centre.

    Raises:
        UsageError: the score is not defined here.
    """
    step = SCORES[score]
    if step is steps.ood_by_mutual_info and not has_information(found):
        raise UsageError(
            "\0score\0 mutual_info: this integrator provides no mutual information",
            hint="use another score, or \0integrator\0 mc",
            code="unsupported_export",
        )
    if step not in (steps.ood_by_energy, steps.ood_by_max_logit):
        return found.also(step)
    if not layout.likelihood.is_exclusive:
        raise UsageError(
            f"\0score\0 {score} needs mutually exclusive classes, but the data are multi-label",
            code="unsupported_export",
        )
    combination = _build_identity(layout)
    if not layout.likelihood.is_shift_invariant:
        combination = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)  # balanced logits of two classes
    weights = _weights(layout, center, combination)
    return found.also(step, {"center_weight": weights["weight"], "center_bias": weights["bias"]})


def add_combined_score(found: HeadParts, detector: FittedViews) -> HeadParts:
    """Add the negated combined score, so that higher is farther from the training data."""
    layout = detector.layout
    if layout is not None and detector.theta is not None:
        is_single = layout.likelihood.is_exclusive and not layout.likelihood.is_shift_invariant
        balanced = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
        weights = _weights(layout, detector.theta.cpu(), balanced if is_single else _build_identity(layout))
        step = steps.energy_view if layout.likelihood.is_exclusive else steps.label_energy_view
        found = found.also(step, {"network_weight": weights["weight"], "network_bias": weights["bias"]})
    if detector.gaussians is not None:
        within, centers = detector.gaussians.within, detector.gaussians.centers
        tensors = {"class_mean": within.mean, "whitening": within.root, "class_centers": centers}
        found = found.also(steps.mahalanobis_view, tensors)
    neighbors = detector.neighbors
    ranks = torch.arange(neighbors.num_neighbors)
    found = found.also(steps.knn_view, {"neighbors": neighbors.features, "neighbor_ranks": ranks})
    references: Values = {}
    for name, own in detector.ranks.items():
        references |= {f"knots_{name}": own.knots, f"counts_{name}": own.counts}
        references[f"tail_{name}"] = torch.tensor(own.scale, dtype=torch.float64)
    return found.also(steps.ood_by_combined, references)


SCORES: Mapping[str, Step] = {
    "max_prob": steps.ood_by_max_prob,
    "entropy": steps.ood_by_entropy,
    "mutual_info": steps.ood_by_mutual_info,
    "energy": steps.ood_by_energy,
    "max_logit": steps.ood_by_max_logit,
}


def add_sets(
    found: HeadParts, thresholds: Tensor, rank_penalty: Tensor | None = None, *, is_filled: bool = False
) -> HeadParts:
    """Add the conformal set of each input: the classes whose score is at most a threshold.

    Args:
        thresholds: (1,), or (C,) by class.
        rank_penalty: (C,) by rank, zeros for aps; scores are then the cumulative probability down to and including the class, plus the
            penalty. None for lac, with scores 1 - probability.
        is_filled: whether an empty set gets the most probable class.
    """
    if rank_penalty is None:
        found = found.also(steps.least_ambiguous_set, {"set_threshold": thresholds})
    else:
        found = found.also(steps.adaptive_set, {"set_threshold": thresholds, "rank_penalty": rank_penalty})
    return found.also(steps.filled_set) if is_filled else found


def has_information(found: HeadParts) -> bool:
    """Return whether the steps compute mutual information."""
    averages = steps.average_softmax, steps.average_two_classes, steps.average_labels
    return any(step in (*averages, steps.dirichlet) for step in found.steps)


def _moments(posterior: Any, combination: Tensor) -> HeadParts:
    """Return the mean and variance of combinations (J, K) of the logits."""
    layout = posterior.layout
    step, tensors = build_variance_step(getattr(posterior, "covariance", None), layout, combination)
    return HeadParts((steps.mean_logits, step), {**_weights(layout, posterior.center, combination), **tensors})


def _weights(layout: HeadLayout, theta: Tensor, combination: Tensor) -> Values:
    """Return weight (J, D) and bias (J,) of combinations (J, K) of the logits at theta (P,)."""
    weight, bias = layout.split(theta.double())
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return {"weight": combination @ weight, "bias": combination @ bias}


def _build_identity(layout: HeadLayout) -> Tensor:
    return torch.eye(layout.num_outputs, dtype=torch.float64)


def _minus_mean(layout: HeadLayout) -> Tensor:
    return _build_identity(layout) - 1 / layout.num_outputs


def _difference() -> Tensor:
    return torch.tensor([[-1.0, 1.0]], dtype=torch.float64)


def _link(layout: HeadLayout) -> Step:
    """Return the step from logits to probabilities."""
    if not layout.likelihood.is_exclusive:
        return steps.labels
    return steps.softmax if layout.likelihood.is_shift_invariant else steps.two_classes


def _average(layout: HeadLayout) -> Step:
    """Return the step from drawn logits to average probabilities."""
    if not layout.likelihood.is_exclusive:
        return steps.average_labels
    return steps.average_softmax if layout.likelihood.is_shift_invariant else steps.average_two_classes


def _store_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to float32, or to float16 if requested and the error is below 1/1000 of the largest number."""
    single = tensor.detach().float().cpu().contiguous().clone()
    if dtype != torch.float16 or single.ndim < 2 or single.numel() < _FEW:  # weights of draws must sum to one
        return single
    half = single.half()
    largest = float(single.abs().max())
    is_near = math.isfinite(float(half.abs().max())) and float((half.float() - single).abs().max()) <= 1e-3 * largest
    return half if is_near else single


def _refusal_error(what: str, instead: str) -> UsageError:
    return UsageError(
        f"{what} cannot be exported", hint=f"export with \0integrator\0 {instead}", code="unsupported_export"
    )
