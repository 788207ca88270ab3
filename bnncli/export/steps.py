"""The steps from features to outputs, each a function that takes tensors by name and gives further ones.

They use what every exporter of torch knows, read no size of the batch, and compute in the precision of what they are given.
`PortableHead` runs a list of them. Their source is written into files as it stands (`_torch`), so each stands alone: it calls nothing
of this package. B examples, D features, K logits, C classes, S draws, F directions.
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
    """Outputs by name, of features (B, D)."""

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
    """Logits at the mean of the weights, (B, K)."""
    return {"mean": v["features"] @ v["weight"].T + v["bias"]}


def certain_logits(v: Values) -> Values:
    """Logits (B, K) of one setting of the weights."""
    return {"logits": v["features"] @ v["weight"].T + v["bias"]}


def independent_weights(v: Values) -> Values:
    """Variances of the logits (B, K) where the weights are independent."""
    return {"variance": v["features"].square() @ v["weight_variance"].T + v["bias_variance"]}


def shared_directions(v: Values) -> Values:
    """Variances (B, F) of what the logits are made of, along directions of the features that all of them share."""
    turned = (v["features"] @ v["directions"] + v["direction_bias"]).square()
    return {"variance": turned @ v["loads"]}


def own_directions(v: Values) -> Values:
    """Variances of the logits (B, K), each along directions of its own, (K, D, F)."""
    turned = v["features"] @ v["directions"].permute(1, 0, 2).flatten(1) + v["direction_bias"].flatten()
    return {"variance": turned.unflatten(1, v["direction_bias"].shape).square().sum(2)}


def probit(v: Values) -> Values:
    """Logits whose link is the mean of the link: MacKay (1992), Gibbs (1998)."""
    return {"logits": v["mean"] / (1 + math.pi / 8 * v["variance"]).sqrt()}


def mean_field(v: Values) -> Values:
    """Logits by the mean sigmoids of all pairs, each with the variance of one: Lu, Ie and Sha (2020), order 0."""
    below = v["mean"] - v["mean"].amax(1, keepdim=True)
    scale = (1 + math.pi / 8 * v["variance"]).rsqrt()
    sums = (below.unsqueeze(1) * scale.unsqueeze(2)).exp().sum(2)
    return {"logits": below * scale - sums.log()}


def mean_field_of_pairs(v: Values) -> Values:
    """The same with the variances of both, order 1."""
    scale = (1 + math.pi / 8 * (v["variance"].unsqueeze(2) + v["variance"].unsqueeze(1))).rsqrt()
    return {"logits": -((v["mean"].unsqueeze(1) - v["mean"].unsqueeze(2)) * scale).logsumexp(2)}


def shrink(v: Values) -> Values:
    """Means and variances brought to where the bridge is near its Gaussian."""
    excess = (v["variance"].mean(1, keepdim=True) / math.sqrt(v["mean"].shape[1] / 2)).clamp_min(1)
    return {"mean": v["mean"] / excess.sqrt(), "variance": v["variance"] / excess}


def bridge(v: Values) -> Values:
    """Logarithms of a Dirichlet's parameters (B, C): Hobbhahn (2020), eq. (2.7)."""
    count = v["mean"].shape[1]
    ratio = v["mean"] + (-v["mean"]).logsumexp(1, keepdim=True) - 2 * math.log(count)
    if count > 2:
        ratio = torch.logaddexp(ratio, torch.full_like(ratio, math.log1p(-2 / count)))
    return {"log_concentration": ratio - v["variance"].clamp(1e-30, 1e30).log()}


def dirichlet(v: Values) -> Values:
    """Its mean, and the mutual information sum_k p_k g(a_k) - g(a_0) with g(a) = digamma(a + 1) - log a."""
    log_a = torch.cat([v["log_concentration"], v["log_concentration"].logsumexp(1, keepdim=True)], 1)
    a = log_a.clamp(-60, 60).exp()
    y = a + 7  # digamma by its recurrence, then its series
    excess = torch.log1p(7 / a) - 1 / (2 * y) - 1 / (12 * y**2) + 1 / (120 * y**4)
    for i in range(1, 7):
        excess = excess - 1 / (a + i)
    probs = v["log_concentration"].softmax(1)
    information = (probs * excess[:, :-1]).sum(1) - excess[:, -1]
    return {"probs": probs, "mutual_information": information.clamp_min(0)}


def softmax(v: Values) -> Values:
    """Probabilities (B, C) of classes that exclude each other."""
    return {"probs": v["logits"].softmax(1)}


def two_classes(v: Values) -> Values:
    """Probabilities (B, 2) by one logit, that of the second class against the first."""
    return {"probs": torch.cat([(-v["logits"]).sigmoid(), v["logits"].sigmoid()], 1)}


def labels(v: Values) -> Values:
    """Probabilities (B, C) of labels, each there or not."""
    return {"probs": v["logits"].sigmoid()}


def drawn_logits(v: Values) -> Values:
    """Logits (B, S, K) under draws of the weights (S, K, D)."""
    flat = v["features"] @ v["drawn_weight"].flatten(0, 1).T + v["drawn_bias"].flatten()
    return {"drawn": flat.unflatten(1, v["drawn_bias"].shape)}


def spread_logits(v: Values) -> Values:
    """Logits (B, S, K) at their mean plus their deviation times points (S, K), or (S, 1) the same for all."""
    return {"drawn": v["mean"].unsqueeze(1) + v["variance"].sqrt().unsqueeze(1) * v["points"]}


def spread_along_basis(v: Values) -> Values:
    """The same where the variances are those along a basis (K, K)."""
    return {"drawn": v["mean"].unsqueeze(1) + (v["variance"].sqrt().unsqueeze(1) * v["points"]) @ v["basis"].T}


def average_softmax(v: Values) -> Values:
    """Mean of the softmax over draws with weights (S,), and the entropy of the mean minus the mean entropy."""
    logs = v["drawn"].log_softmax(2)
    weighted = logs.exp() * v["weights"][:, None]
    probs = weighted.sum(1)
    information = (weighted * logs).sum((1, 2)) - (probs * probs.clamp_min(1e-38).log()).sum(1)
    return {"probs": probs, "mutual_information": information.clamp_min(0)}


def average_two_classes(v: Values) -> Values:
    """The same by one logit, that of the second class against the first."""
    logs = torch.nn.functional.logsigmoid(torch.cat([-v["drawn"], v["drawn"]], 2))
    weighted = logs.exp() * v["weights"][:, None]
    probs = weighted.sum(1)
    information = (weighted * logs).sum((1, 2)) - (probs * probs.clamp_min(1e-38).log()).sum(1)
    return {"probs": probs, "mutual_information": information.clamp_min(0)}


def average_labels(v: Values) -> Values:
    """The same of labels, each there or not; information is summed over them."""
    logs = torch.nn.functional.logsigmoid(torch.cat([v["drawn"], -v["drawn"]], 2))
    weighted = logs.exp() * v["weights"][:, None]
    both = weighted.sum(1)
    information = (weighted * logs).sum((1, 2)) - (both * both.clamp_min(1e-38).log()).sum(1)
    return {"probs": both[:, : v["drawn"].shape[2]], "mutual_information": information.clamp_min(0)}


def entropy(v: Values) -> Values:
    """Of the probabilities, nats, (B,)."""
    return {"entropy": -(v["probs"] * v["probs"].clamp_min(1e-38).log()).sum(1)}


def label_entropy(v: Values) -> Values:
    """Sum of the labels' entropies, nats, (B,)."""
    absent = 1 - v["probs"]
    terms = v["probs"] * v["probs"].clamp_min(1e-38).log() + absent * absent.clamp_min(1e-38).log()
    return {"entropy": -terms.sum(1)}


def ood_by_max_prob(v: Values) -> Values:
    """Minus the largest probability: Hendrycks and Gimpel (2017)."""
    return {"ood_score": -v["probs"].amax(1)}


def ood_by_entropy(v: Values) -> Values:
    """The entropy."""
    return {"ood_score": v["entropy"] * 1}


def ood_by_mutual_info(v: Values) -> Values:
    """The mutual information: Houlsby et al. (2011)."""
    return {"ood_score": v["mutual_information"] * 1}


def ood_by_energy(v: Values) -> Values:
    """Minus log sum exp of the logits at the centre: Liu et al. (2020)."""
    return {"ood_score": -(v["features"] @ v["center_weight"].T + v["center_bias"]).logsumexp(1)}


def ood_by_max_logit(v: Values) -> Values:
    """Minus the largest logit at the centre: Hendrycks et al. (2022)."""
    return {"ood_score": -(v["features"] @ v["center_weight"].T + v["center_bias"]).amax(1)}


def energy_view(v: Values) -> Values:
    """log sum exp (B,) of the network's own logits: Liu et al. (2020)."""
    return {"view_energy": (v["features"] @ v["network_weight"].T + v["network_bias"]).logsumexp(1)}


def label_energy_view(v: Values) -> Values:
    """The same of labels, each there or not: Wang et al. (2021)."""
    logits = v["features"] @ v["network_weight"].T + v["network_bias"]
    return {"view_energy": torch.nn.functional.softplus(logits).sum(1)}


def mahalanobis_view(v: Values) -> Values:
    """Minus the squared distance (B,) of whitened features to the nearest class mean: Lee et al. (2018)."""
    whitened = (v["features"] - v["class_mean"]) @ v["whitening"]
    cross = v["class_centers"].square().sum(1) - 2 * whitened @ v["class_centers"].T
    return {"view_mahalanobis": -(whitened.square().sum(1) + cross.amin(1)).clamp_min(0)}


def knn_view(v: Values) -> Values:
    """Minus the distance (B,) of features at unit length to the k-th nearest of T training ones: Sun et al. (2022)."""
    unit = v["features"] / v["features"].square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    closeness = unit @ v["neighbors"].T - v["neighbors"].square().sum(1) / 2
    nearest = closeness.topk(v["neighbor_ranks"].shape[0], dim=1).values[:, -1]
    return {"view_knn": -(unit.square().sum(1) - 2 * nearest).clamp_min(0).sqrt()}


def ood_by_combined(v: Values) -> Values:
    """Minus the sum of the log p-values of all views, by interpolated ranks among reference scores: Haroush et al. (2022)."""
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
    """Classes (B, C) of which one less the probability is at most a threshold (1,) or (C,): Sadinle, Lei and Wasserman (2019)."""
    return {"set": 1 - v["probs"] <= v["set_threshold"]}


def adaptive_set(v: Values) -> Values:
    """Classes (B, C), likeliest first, while what they have used up, and a penalty (C,) of their rank, is at most a threshold:
    Romano, Sesia and Candes (2020), Angelopoulos et al. (2021)."""
    ordered, order = v["probs"].sort(1, descending=True)
    scores = (ordered.cumsum(1) + v["rank_penalty"]).gather(1, order.argsort(1))
    return {"set": scores <= v["set_threshold"]}


def filled_set(v: Values) -> Values:
    """The same where an empty set has the likeliest class."""
    is_likeliest = torch.zeros_like(v["probs"]).scatter(1, v["probs"].argmax(1, keepdim=True), 1.0) > 0
    return {"set": v["set"] | (is_likeliest & ~v["set"].any(1, keepdim=True))}
