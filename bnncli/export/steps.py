"""Steps from features to outputs: functions that take named tensors and return further ones.

They only use operations that every torch exporter supports, do not read the batch size, and compute in the precision
of their input. `PortableHead` runs a list of them. Their source is written to files unchanged (`_torch`), so each is
self-contained and calls nothing from this package. B examples, D features, K logits, C classes, S draws, F
directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Values: TypeAlias = "dict[str, Tensor]"
Step = Callable[[Values], Values]
OUTPUTS = ("probs", "entropy", "mutual_information", "ood_score", "set")


class PortableHead(torch.nn.Module):
    """Map features (B, D) to named outputs."""

    def __init__(self, steps: Sequence[Step], tensors: Values) -> None:
        super().__init__()
        self.steps = steps
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, features: Tensor) -> Values:
        values = {name: tensor.float() for name, tensor in self.named_buffers()}
        values["features"] = features.float()
        for step in self.steps:
            values.update(step(values))
        return {name: values[name] for name in OUTPUTS if name in values}


def mean_logits(v: Values) -> Values:
    """Return the logits (B, K) at the mean of the weights."""
    return {"mean": v["features"] @ v["weight"].T + v["bias"]}


def certain_logits(v: Values) -> Values:
    """Return the logits (B, K) at a single setting of the weights."""
    return {"logits": v["features"] @ v["weight"].T + v["bias"]}


def independent_weights(v: Values) -> Values:
    """Return the variances (B, K) of the logits for independent weights."""
    return {"variance": v["features"].square() @ v["weight_variance"].T + v["bias_variance"]}


def shared_directions(v: Values) -> Values:
    """Return variances (B, F) along feature directions that all logits share."""
    turned = (v["features"] @ v["directions"] + v["direction_bias"]).square()
    return {"variance": turned @ v["loads"]}


def own_directions(v: Values) -> Values:
    """Return the variances (B, K) of the logits, each along its own directions (K, D, F)."""
    turned = v["features"] @ v["directions"].permute(1, 0, 2).flatten(1) + v["direction_bias"].flatten()
    return {"variance": turned.unflatten(1, v["direction_bias"].shape).square().sum(2)}


def probit(v: Values) -> Values:
    """Return logits whose link approximates the mean of the link: MacKay (1992), Gibbs (1998)."""
    return {"logits": v["mean"] / (1 + math.pi / 8 * v["variance"]).sqrt()}


def mean_field(v: Values) -> Values:
    """Return logits from mean sigmoids of all pairs, each with one variance: Lu, Ie and Sha (2020), order 0."""
    below = v["mean"] - v["mean"].amax(1, keepdim=True)
    scale = (1 + math.pi / 8 * v["variance"]).rsqrt()
    sums = (below.unsqueeze(1) * scale.unsqueeze(2)).exp().sum(2)
    return {"logits": below * scale - sums.log()}


def mean_field_of_pairs(v: Values) -> Values:
    """Return logits from mean sigmoids of all pairs, each with both variances: Lu, Ie and Sha (2020), order 1."""
    scale = (1 + math.pi / 8 * (v["variance"].unsqueeze(2) + v["variance"].unsqueeze(1))).rsqrt()
    return {"logits": -((v["mean"].unsqueeze(1) - v["mean"].unsqueeze(2)) * scale).logsumexp(2)}


def shrink(v: Values) -> Values:
    """Shrink means and variances to where the bridge is close to its Gaussian."""
    excess = (v["variance"].mean(1, keepdim=True) / math.sqrt(v["mean"].shape[1] / 2)).clamp_min(1)
    return {"mean": v["mean"] / excess.sqrt(), "variance": v["variance"] / excess}


def bridge(v: Values) -> Values:
    """Return the logarithms of a Dirichlet's parameters (B, C): Hobbhahn (2020), eq. (2.7)."""
    count = v["mean"].shape[1]
    ratio = v["mean"] + (-v["mean"]).logsumexp(1, keepdim=True) - 2 * math.log(count)
    if count > 2:
        ratio = torch.logaddexp(ratio, torch.full_like(ratio, math.log1p(-2 / count)))
    return {"log_concentration": ratio - v["variance"].clamp(1e-30, 1e30).log()}


def dirichlet(v: Values) -> Values:
    """Return the Dirichlet's mean, and mutual information sum_k p_k g(a_k) - g(a_0) with g(a) = digamma(a + 1) - log a."""
    log_a = torch.cat([v["log_concentration"], v["log_concentration"].logsumexp(1, keepdim=True)], 1)
    a = log_a.clamp(-60, 60).exp()
    y = a + 7  # digamma by recurrence, then series
    excess = torch.log1p(7 / a) - 1 / (2 * y) - 1 / (12 * y**2) + 1 / (120 * y**4)
    for i in range(1, 7):
        excess = excess - 1 / (a + i)
    probs = v["log_concentration"].softmax(1)
    information = (probs * excess[:, :-1]).sum(1) - excess[:, -1]
    return {"probs": probs, "mutual_information": information.clamp_min(0)}


def softmax(v: Values) -> Values:
    """Return probabilities (B, C) of exclusive classes."""
    return {"probs": v["logits"].softmax(1)}


def two_classes(v: Values) -> Values:
    """Return probabilities (B, 2) from one logit, for the second class against the first."""
    return {"probs": torch.cat([(-v["logits"]).sigmoid(), v["logits"].sigmoid()], 1)}


def logs(v: Values) -> Values:
    """Return the logarithms of given probabilities (B, C), none of them below a floor, as logits."""
    return {"logits": v["features"].maximum(v["floor"]).log()}


def log_odds(v: Values) -> Values:
    """Return the log odds of given probabilities (B, C) of labels, none of them closer to 0 or 1 than a floor."""
    present = v["features"].maximum(v["floor"])
    return {"logits": present.log() - (1 - v["features"]).maximum(v["floor"]).log()}


def both_logits(v: Values) -> Values:
    """Return logits (B, 2) of two classes from one logit, for the second class against the first."""
    return {"logits": torch.cat([-v["logits"] / 2, v["logits"] / 2], 1)}


def labels(v: Values) -> Values:
    """Return probabilities (B, C) of independent binary labels."""
    return {"probs": v["logits"].sigmoid()}


def drawn_logits(v: Values) -> Values:
    """Return logits (B, S, K) for draws of the weights (S, K, D)."""
    flat = v["features"] @ v["drawn_weight"].flatten(0, 1).T + v["drawn_bias"].flatten()
    return {"drawn": flat.unflatten(1, v["drawn_bias"].shape)}


def spread_logits(v: Values) -> Values:
    """Return logits (B, S, K): mean plus standard deviation times points (S, K), or shared points (S, 1)."""
    return {"drawn": v["mean"].unsqueeze(1) + v["variance"].sqrt().unsqueeze(1) * v["points"]}


def spread_along_basis(v: Values) -> Values:
    """Return logits (B, S, K) from variances along a basis (K, K)."""
    return {"drawn": v["mean"].unsqueeze(1) + (v["variance"].sqrt().unsqueeze(1) * v["points"]) @ v["basis"].T}


def average_softmax(v: Values) -> Values:
    """Return the mean softmax over draws with weights (S,), and the entropy of the mean minus the mean entropy."""
    logs = v["drawn"].log_softmax(2)
    weighted = logs.exp() * v["weights"][:, None]
    probs = weighted.sum(1)
    information = (weighted * logs).sum((1, 2)) - (probs * probs.clamp_min(1e-38).log()).sum(1)
    return {"probs": probs, "mutual_information": information.clamp_min(0)}


def average_two_classes(v: Values) -> Values:
    """Return the averages of `average_softmax` from one logit, for the second class against the first."""
    logs = torch.nn.functional.logsigmoid(torch.cat([-v["drawn"], v["drawn"]], 2))
    weighted = logs.exp() * v["weights"][:, None]
    probs = weighted.sum(1)
    information = (weighted * logs).sum((1, 2)) - (probs * probs.clamp_min(1e-38).log()).sum(1)
    return {"probs": probs, "mutual_information": information.clamp_min(0)}


def average_labels(v: Values) -> Values:
    """Return the averages of `average_softmax` for binary labels; mutual information is summed over labels."""
    logs = torch.nn.functional.logsigmoid(torch.cat([v["drawn"], -v["drawn"]], 2))
    weighted = logs.exp() * v["weights"][:, None]
    both = weighted.sum(1)
    information = (weighted * logs).sum((1, 2)) - (both * both.clamp_min(1e-38).log()).sum(1)
    return {"probs": both[:, : v["drawn"].shape[2]], "mutual_information": information.clamp_min(0)}


def entropy(v: Values) -> Values:
    """Return the entropy (B,) of the probabilities in nats."""
    return {"entropy": -(v["probs"] * v["probs"].clamp_min(1e-38).log()).sum(1)}


def label_entropy(v: Values) -> Values:
    """Return the sum of the labels' entropies (B,) in nats."""
    absent = 1 - v["probs"]
    terms = v["probs"] * v["probs"].clamp_min(1e-38).log() + absent * absent.clamp_min(1e-38).log()
    return {"entropy": -terms.sum(1)}


def ood_by_max_prob(v: Values) -> Values:
    """Return minus the largest probability: Hendrycks and Gimpel (2017)."""
    return {"ood_score": -v["probs"].amax(1)}


def ood_by_entropy(v: Values) -> Values:
    """Return the entropy."""
    return {"ood_score": v["entropy"] * 1}


def ood_by_mutual_info(v: Values) -> Values:
    """Return the mutual information: Houlsby et al. (2011)."""
    return {"ood_score": v["mutual_information"] * 1}


def ood_by_energy(v: Values) -> Values:
    """Return minus log sum exp of the logits at the centre: Liu et al. (2020)."""
    return {"ood_score": -(v["features"] @ v["center_weight"].T + v["center_bias"]).logsumexp(1)}


def ood_by_max_logit(v: Values) -> Values:
    """Return minus the largest logit at the centre: Hendrycks et al. (2022)."""
    return {"ood_score": -(v["features"] @ v["center_weight"].T + v["center_bias"]).amax(1)}


def energy_view(v: Values) -> Values:
    """Return log sum exp (B,) of the network's own logits: Liu et al. (2020)."""
    return {"view_energy": (v["features"] @ v["network_weight"].T + v["network_bias"]).logsumexp(1)}


def label_energy_view(v: Values) -> Values:
    """Return the energy of binary labels (B,) from the network's own logits: Wang et al. (2021)."""
    logits = v["features"] @ v["network_weight"].T + v["network_bias"]
    return {"view_energy": torch.nn.functional.softplus(logits).sum(1)}


def mahalanobis_view(v: Values) -> Values:
    """Return minus the squared distance (B,) of whitened features to the nearest class mean: Lee et al. (2018)."""
    whitened = (v["features"] - v["class_mean"]) @ v["whitening"]
    cross = v["class_centers"].square().sum(1) - 2 * whitened @ v["class_centers"].T
    return {"view_mahalanobis": -(whitened.square().sum(1) + cross.amin(1)).clamp_min(0)}


def knn_view(v: Values) -> Values:
    """Return minus the distance (B,) of unit-length features to the k-th nearest of T training ones: Sun et al. (2022)."""
    unit = v["features"] / v["features"].square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    closeness = unit @ v["neighbors"].T - v["neighbors"].square().sum(1) / 2
    nearest = closeness.topk(v["neighbor_ranks"].shape[0], dim=1).values[:, -1]
    return {"view_knn": -(unit.square().sum(1) - 2 * nearest).clamp_min(0).sqrt()}


def ood_by_combined(v: Values) -> Values:
    """Return minus the sum of the views' log p-values, by interpolated ranks in reference scores: Haroush et al. (2022)."""
    total = torch.zeros_like(v["features"][:, 0])
    for name in ("energy", "mahalanobis", "knn"):
        if "view_" + name in v:
            score, knots, counts = v["view_" + name], v["knots_" + name], v["counts_" + name]
            width = (knots[1:] - knots[:-1]).clamp_min(1e-30)
            shares = ((score.unsqueeze(1) - knots[:-1]) / width).clamp(0, 1)
            count = counts[0] + shares @ (counts[1:] - counts[:-1])
            excess = (knots[0] - score).clamp_min(0) / v["tail_" + name]
            total = total + torch.log1p(excess) - ((1 + count) / (1 + counts[-1])).log()
    return {"ood_score": total}


def least_ambiguous_set(v: Values) -> Values:
    """Return the classes (B, C) with 1 - probability at most a threshold (1,) or (C,): Sadinle, Lei and Wasserman (2019)."""
    return {"set": 1 - v["probs"] <= v["set_threshold"]}


def adaptive_set(v: Values) -> Values:
    """Return the classes (B, C) whose cumulative probability and rank penalty (C,) are at most a threshold.

    Romano, Sesia and Candes (2020), Angelopoulos et al. (2021).
    """
    ordered, order = v["probs"].sort(1, descending=True)
    scores = (ordered.cumsum(1) + v["rank_penalty"]).gather(1, order.argsort(1))
    return {"set": scores <= v["set_threshold"]}


def filled_set(v: Values) -> Values:
    """Return the set, with the most probable class added if it is empty."""
    is_likeliest = torch.zeros_like(v["probs"]).scatter(1, v["probs"].argmax(1, keepdim=True), 1.0) > 0
    return {"set": v["set"] | (is_likeliest & ~v["set"].any(1, keepdim=True))}
