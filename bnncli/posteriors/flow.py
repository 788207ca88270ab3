"""A Gaussian pushed through invertible layers, as refinement returns it.

Kristiadi, Eschenhagen, Hennig (2022), arXiv:2205.10041, equation 3, with the Jacobian evaluated at the layer's input:
log q(F(z)) = log N(z) - sum_l log|det J_l(z_{l-1})|.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli import registry
from bnncli.flows import SPACES, FlowLayer, settings_of
from bnncli.lazy import no_grad, torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.module import ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors import sample_from_noise, thetas_at_once
from bnncli.posteriors.gaussian import Gaussian
from bnncli.shapes import check_shapes
from bnncli.structures.directions import Subspace
from bnncli.structures.row_space import rows_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Flow:
    """A base Gaussian and the layers, applied in order. It has no center: its mean has no closed form.

    Args:
        base: N(m, L L^T).
        layers: float64 modules of one kind. Where the base was fitted in the row space of the features they act there,
          in `layer_layout`, and leave the rest as it is: its posterior is the prior.
        kind: the layers' name in the registry.
        space: whitened, theta = m + L F(z), or weight, theta = F(m + L z), z standard normal.
        subspace: of whitened coordinates (in the row space, where the base has one): the layers act on the coordinates
          along it, and the rest keeps the base's distribution, which is independent of them.
    """

    type: ClassVar[str] = "flow"
    base: Gaussian
    layers: tuple[FlowLayer, ...]
    kind: str
    space: str = "whitened"
    subspace: Subspace | None = None

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise ValueError(f"space: expected one of {', '.join(SPACES)}; got {self.space!r}")
        if self.subspace is not None:
            if self.space != "whitened":
                raise ValueError("a subspace needs whitened coordinates")
            size = self._row_layout.num_params
            check_shapes(basis=(self.subspace.basis, f"{size} K"))

    @property
    def layout(self) -> ParamLayout:
        """Return the layout of theta."""
        return self.base.layout

    @property
    def layer_layout(self) -> ParamLayout:
        """Return the layout of the coordinates that the layers act on."""
        return self._row_layout if self.subspace is None else self.subspace.layout

    @property
    def _row_layout(self) -> ParamLayout:
        """Return the layout of theta in the row space, or of all of it without one."""
        within = rows_of(self.base.covariance)
        return self.layout if within is None else within.rows.reduced

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Return standard normal draws (S, P) float64, for from_noise."""
        return self.base.noise(num_samples, generator)

    def quasi_noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Return standard normal draws (S, P) from scrambled Sobol points."""
        return self.base.quasi_noise(num_samples, generator)

    @no_grad
    def from_noise(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return theta (S, P) and its log density (S,), both float64, for standard normal noise (S, P)."""
        base_theta, base_log_density = self.base.from_noise(noise)
        x, log_det = self._push(noise if self.space == "whitened" else base_theta)
        theta = self.base.mean + self.base.covariance.unwhiten(x) if self.space == "whitened" else x
        return theta, base_log_density - log_det

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return draws (S, P), float32."""
        return sample_from_noise(self, num_samples or 1, generator)

    @no_grad
    def log_density(self, theta: Tensor) -> Tensor:
        """Return log q(theta), (S,) float64, for any theta (S, P), through the inverse of each layer."""
        theta = theta.to(self.base.mean)
        whiten = self.base.covariance.whiten
        x = whiten(theta - self.base.mean) if self.space == "whitened" else theta
        x = self._act(x, self._pull)
        noise = x if self.space == "whitened" else whiten(x - self.base.mean)
        return self.from_noise(noise)[1]

    def bound_to(self, network: ModuleNetwork) -> Flow:
        """Return the flow bound to a network that computes the logits."""
        return replace(self, base=self.base.bound_to(network))

    def to(self, device: torch.device | str) -> Flow:
        """Return a copy on another device."""
        kind = registry.load_class("flows", self.kind)
        layers = tuple(
            kind.from_tensors(layer.to_tensors(), self.layer_layout).to(device=device) for layer in self.layers
        )
        subspace = None if self.subspace is None else self.subspace.to(device=device)
        return replace(self, base=self.base.to(device), layers=layers, subspace=subspace)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the base's tensors, `flow.<i>.<parameter>` and `subspace.basis`; kind, length, space, settings and subspace as JSON."""
        tensors, meta = self.base.to_tensors()
        for name in [name for name in tensors if name.startswith("prior.")]:
            tensors[f"base.{name}"] = tensors.pop(name)  # the target's prior may differ from the base's
        for i, layer in enumerate(self.layers):
            tensors |= {f"flow.{i}.{name}": value for name, value in layer.to_tensors().items()}
        flow_meta = {"type": self.type, "flow": self.kind, "length": len(self.layers), "space": self.space}
        if self.subspace is not None:
            tensors["subspace.basis"] = self.subspace.basis.double().cpu().contiguous()
            flow_meta["subspace"] = self.subspace.basis.shape[1]
        settings = settings_of(self.layers[0]) if self.layers else {}
        return tensors, {**meta, **flow_meta, "settings": settings}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Flow:
        """Invert to_tensors."""
        kind = registry.load_class("flows", meta["flow"])
        others = {name: part for name, part in tensors.items() if not name.startswith("prior.")}
        prior = Prior.found_in(tensors, prefix="base.")
        base = Gaussian.from_tensors({**others, **(prior.to_tensors() if prior else {})}, meta)
        subspace = Subspace(tensors["subspace.basis"]) if "subspace.basis" in tensors else None
        bare = cls(base, (), meta["flow"], meta["space"], subspace)
        layers = []
        for i in range(meta["length"]):
            prefix = f"flow.{i}."
            own = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            layers.append(kind.from_tensors(own, bare.layer_layout))
        return replace(bare, layers=tuple(layers))

    def _push(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Push x (S, P) through all layers; return the image and the sum of the log determinants (S,)."""
        log_det = x.new_zeros(x.shape[0])

        def through(x: Tensor) -> Tensor:
            nonlocal log_det
            for layer in self.layers:
                x, step = layer(x)
                log_det = log_det + step
            return x

        return self._act(x, through), log_det

    def _pull(self, x: Tensor) -> Tensor:
        """Pull x back through all layers, the last one first."""
        for layer in reversed(self.layers):
            x = layer.inverse(x)
        return x

    def _act(self, x: Tensor, through: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a map to the coordinates of x (S, P) that the layers act on."""
        within = rows_of(self.base.covariance)
        rows = None if within is None else within.rows
        spaces = [space for space in (rows, self.subspace) if space is not None]
        if not spaces:
            return through(x)
        inside = x
        for space in spaces:
            inside = space.reduce(inside)
        change = through(inside) - inside
        for space in reversed(spaces):
            change = space.lift(change)
        return x + change


def is_idle(flow: Flow, noise: Tensor, threshold: float = 0.05) -> bool:
    """Return whether the layers do next to nothing: they move theta by less than `threshold` standard deviations of the base.

    The move is the distance in whitened coordinates, root mean square over noise (S, P): a shift by 0.05 is a
    Kullback-Leibler divergence of 0.001 nats.
    """
    squares = []
    for some in noise.split(thetas_at_once(flow.layout.num_params)):
        moved = flow.base.covariance.whiten(flow.from_noise(some)[0] - flow.base.mean) - some
        squares.append(moved.square_().sum(dim=1))
    return bool(torch.cat(squares).mean().sqrt() < threshold)
