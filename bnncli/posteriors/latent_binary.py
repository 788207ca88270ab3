"""A network whose weights are each included or not, as fit-lbbnn returns it.

Skaaret-Lund (2022), chapter 4. theta is the weights and biases of all layers, excluded weights being exactly zero;
without hidden layers it is the head's theta, as for any other posterior. Repeats of the fit are an ensemble: draws take
them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.latent.factors import Factors, MultiplierModel
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout, NetworkLayout
from bnncli.posteriors import LATENT_BINARY

if TYPE_CHECKING:
    from torch import Tensor

# Networks of a prediction with hidden layers, where each draw is a forward pass; fewer where the network is large. The
# thesis has 10. With a hidden layer of 100 (384 inputs, 20 classes, 15 epochs) the Monte Carlo error of 10 draws was,
# for NLL, as large as the sampling error of 10,000 examples, and for the accuracy 4 times it; with 200 draws it was
# 0.17 and 0.6 (benchmarks/draws.py), at a fifth of the time of 1,000.
DEFAULT_NETWORKS = 200


@dataclass(frozen=True)
class LatentBinary:
    """Factors of q, with the means of their multipliers.

    Args:
        model: the learnt model.
        multiplier_means: E[z] of each layer's inputs, (R, in); empty without multipliers.
        best: the repeat that represents all where a single network is wanted.
        shift, scale: (D,), of inputs that were standardised, (x - shift) / scale; theta is for the raw inputs.
    """

    type: ClassVar[str] = LATENT_BINARY
    model: LatentModel
    multiplier_means: tuple[Tensor, ...] = ()
    best: int = 0
    shift: Tensor | None = None
    scale: Tensor | None = None

    @property
    def layout(self) -> ClassifierLayout:
        """Return the layout of theta: a head's where there is no hidden layer."""
        return self.model.layout.head or self.model.layout

    @property
    def slab_means(self) -> Tensor:
        """Return the slab mean of every weight, multipliers included, (R, W)."""
        mean = self.model.factors.mean.detach()
        if not self.multiplier_means:
            return mean
        mean = mean.clone()
        for view, z in zip(self.model.layout.weights(mean), self.multiplier_means, strict=True):
            view *= z.unsqueeze(1)
        return mean

    @property
    def inclusion(self) -> Tensor:
        """Return the inclusion probabilities of the best repeat, (W,) float64, so that those near 1 still differ."""
        return torch.sigmoid(self.model.factors.logit[self.best].detach().double())

    @property
    def center(self) -> Tensor:
        """Return the median probability model, theta (P,): the mean of each weight with an inclusion probability above 1/2.

        Barbieri and Berger (2004), arXiv math/0406464.
        """
        return self.with_weights(self.model.factors.logit[self.best] > 0)

    @property
    def mean_theta(self) -> Tensor:
        """Return E[theta], (P,)."""
        return self.with_weights(self.model.factors.inclusion[self.best].detach())

    def pruned(self, threshold: float) -> Tensor:
        """Return theta (P,) with the weights whose inclusion probability is above the threshold."""
        return self.with_weights(self.inclusion > threshold)

    def with_weights(self, share: Tensor) -> Tensor:
        """Return theta (P,) with weights `share` (W,) times their slab means, and the mean biases of the best repeat."""
        return self._theta(self.slab_means[self.best] * share, self.model.factors.bias_mean[self.best].detach())

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Draw theta (S, P) float32 exactly: inclusions are zeros and ones."""
        repeats = torch.arange(num_samples or 1, device=self.model.device) % self.model.num_repeats
        return self._theta(*self.model.draw_weights(repeats, generator)).float()

    def sample_in_runs(self, num_samples: int | None, generator: torch.Generator) -> tuple[Tensor, range]:
        """Return draws and the start of each round of the repeats: rounds are exchangeable, draws of different repeats are not."""
        return self.sample(num_samples, generator), range(0, num_samples or 1, self.model.num_repeats)

    def of_best(self) -> LatentBinary:
        """Return the best repeat alone."""
        rows = slice(self.best, self.best + 1)
        means = tuple(part[rows] for part in self.multiplier_means)
        return replace(self, model=self.model.of_repeats(rows), multiplier_means=means, best=0)

    def to(self, device: torch.device | str) -> LatentBinary:
        """Return a copy on another device."""
        model = self.model
        moved = LatentModel(
            model.layout,
            model.factors.to(device),
            model.prior.to(device),
            tuple(
                MultiplierModel.from_tensors({name: part.detach().to(device) for name, part in one.tensors()})
                for one in model.multipliers
            ),
        )
        return replace(
            self,
            model=moved,
            multiplier_means=tuple(part.to(device) for part in self.multiplier_means),
            shift=None if self.shift is None else self.shift.to(device),
            scale=None if self.scale is None else self.scale.to(device),
        )

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return factors, prior and multipliers by name; sizes as JSON."""
        model = self.model
        tensors = {name: tensor.detach() for name, tensor in model.tensors()}
        tensors |= {f"multiplier.{i}.mean": part for i, part in enumerate(self.multiplier_means)}
        tensors |= {f"slab.{name}": part for name, part in model.prior.tensors().items()}
        if self.shift is not None and self.scale is not None:
            tensors |= {"input.shift": self.shift, "input.scale": self.scale}
        meta = {
            "type": self.type,
            **model.layout.to_meta(),
            "repeats": model.num_repeats,
            "best": self.best,
            "bias_sd": model.prior.bias_sd,
        }
        return tensors, meta

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> LatentBinary:
        """Invert to_tensors."""
        layout = NetworkLayout.from_meta(meta)
        factors = Factors(**{name: tensors[name] for name in ("mean", "rho", "logit", "bias_mean", "bias_rho")})
        slab = {name.removeprefix("slab."): part for name, part in tensors.items() if name.startswith("slab.")}
        prior = SpikeAndSlab.from_tensors(slab, float(meta["bias_sd"]))
        multipliers: list[MultiplierModel] = []
        means: list[Tensor] = []
        while f"multiplier.{len(multipliers)}.start_mean" in tensors:
            prefix = f"multiplier.{len(multipliers)}."
            own = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            means.append(own.pop("mean"))
            multipliers.append(MultiplierModel.from_tensors(own))
        model = LatentModel(layout, factors, prior, tuple(multipliers))
        inputs = tensors.get("input.shift"), tensors.get("input.scale")
        return cls(model, tuple(means), int(meta["best"]), *inputs)

    def _theta(self, weights: Tensor, biases: Tensor) -> Tensor:
        """Return theta (..., P) for raw inputs from weights (..., W) and biases (..., B)."""
        layout = self.model.layout
        if self.shift is None or self.scale is None:
            return layout.join(weights, biases)
        weights, biases = weights.clone(), biases.clone()
        first = layout.weights(weights)[0]
        first /= self.scale
        layout.biases(biases)[0].sub_(first @ self.shift)
        return layout.join(weights, biases)
