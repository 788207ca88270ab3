"""A mixture of Laplace approximations: separately trained networks, each with a Gaussian over its last layer, equally weighted.

Eschenhagen, Daxberger, Hennig and Kristiadi (2021, arXiv:2111.03577), here with Gaussians over the last layers. The
predictive is the mean of the members' own predictives, each on its own features.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout, LogitMaker, ParamPart, consecutive_parts, parts_to_json
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.posteriors.gaussian import Gaussian
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

_DRAWS = 1000  # of all members together, about
_MOST_ELEMENTS = 2**26  # of theta in all default draws together
_STATES, _HEADS = "networks", "heads"


@dataclass(frozen=True)
class MemberLayout:
    """Layout of a theta that holds a member's number, then its last layer's parameters.

    Args:
        head: the last layer's layout.
        whole: of all parameters and buffers of a network.
        states: (M, W) float32, the parameters and buffers of each member.
        heads: (M, H) float32, the members' last layers as trained.
    """

    head: HeadLayout
    whole: ModuleLayout
    states: Tensor
    heads: Tensor
    network: None = None

    def __post_init__(self) -> None:
        check_shapes(
            states=(self.states, f"M {self.whole.num_params}"), heads=(self.heads, f"M {self.head.num_params}")
        )

    def __str__(self) -> str:
        return f"the last layers of {len(self.states)} networks of {self.whole}"

    @property
    def num_params(self) -> int:
        """Return P = 1 + H."""
        return 1 + self.head.num_params

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """Return the part of the member's number, followed by the head's parts."""
        return consecutive_parts(
            [("member", (), False), *((part.name, part.shape, part.is_bias) for part in self.head.parts)]
        )

    @property
    def num_features(self) -> int:
        """Return the size of one input of the networks."""
        return self.whole.num_features

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one input of the networks."""
        return self.whole.input_shape

    @property
    def num_outputs(self) -> int:
        """Return K."""
        return self.head.num_outputs

    @property
    def takes_any_length(self) -> bool:
        """Return whether the length of an input may vary, as for texts."""
        return self.whole.takes_any_length

    @property
    def likelihood_name(self) -> str | None:
        """Return the name of the outputs' likelihood; None where their number implies it."""
        return self.head.likelihood_name

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the K logits."""
        return self.head.likelihood

    @property
    def num_classes(self) -> int:
        """Return the likelihood's number of classes."""
        return self.head.num_classes

    @property
    def widest(self) -> int:
        """Return how many numbers an example takes in a forward pass of a network."""
        return self.whole.widest

    def can_replace(self, head: HeadLayout) -> bool:
        """Return True: the mixture brings its own networks."""
        return True

    def to_json(self) -> list[dict[str, object]]:
        """Return the layout as posterior files state it."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """Return sizes and names of both layouts as JSON."""
        return {**self.whole.to_meta(), "head": self.head.to_meta()}

    def features(self, member: int, inputs: Tensor) -> Tensor:
        """Return the inputs (n, D) of a member's last layer, for inputs (n, ...) of the network."""
        return self.whole.features(inputs, self.states[member], *self.head.split(self.heads[member]))

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Return logits (S, N, K) of inputs (N, D), flat, under theta (S, P)."""
        return self.logit_draws(theta)(features)[1](slice(0, len(theta))).transpose(1, 2)

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """Return a maker of the logits under each of theta (S, P); it computes each member's features once a block of inputs.

        The center is the mean of all draws' logits, whatever the weights.
        """
        numbers = theta[:, 0].long().tolist()
        places = {member: [at for at, own in enumerate(numbers) if own == member] for member in sorted({*numbers})}
        rows = {member: torch.tensor(own, device=theta.device) for member, own in places.items()}
        makers = {member: self.head.logit_draws(theta[own, 1:]) for member, own in rows.items()}

        def at(inputs: Tensor) -> tuple[Tensor, Callable[[slice], Tensor]]:
            with torch.no_grad():
                made = {member: maker(self.features(member, inputs)) for member, maker in makers.items()}
            centers = [center * (len(places[member]) / len(numbers)) for member, (center, _) in made.items()]

            def logits(some: slice) -> Tensor:
                found = theta.new_empty(some.stop - some.start, self.num_outputs, len(inputs))
                for member, (_, logits_of) in made.items():
                    own = places[member]
                    first, last = bisect_left(own, some.start), bisect_left(own, some.stop)
                    if first < last:
                        found[rows[member][first:last] - some.start] = logits_of(slice(first, last))
                return found

            return torch.stack(centers).sum(dim=0), logits

        return at


@dataclass(frozen=True)
class Mixture:
    """M networks, each with a Gaussian over its last layer.

    Args:
        gaussians: of the M members.
        layout: of the draws.
    """

    type: ClassVar[str] = "mixture"
    gaussians: Sequence[Gaussian[HeadLayout]]
    layout: MemberLayout

    @property
    def default_samples(self) -> int:
        """Return about a thousand draws, as many of each member; fewer for large heads."""
        wanted = min(_DRAWS, max(32, _MOST_ELEMENTS // self.layout.num_params))
        return len(self.gaussians) * math.ceil(wanted / len(self.gaussians))

    @property
    def centers(self) -> Tensor:
        """Return each member's number and its Gaussian's mean, (M, P) float64; the mean of their logits is that of all draws."""
        return self._numbered([gaussian.mean for gaussian in self.gaussians])

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Draw theta (S, P) float32 from the members in turn, in a seeded order, so that any stretch of draws has each member's share."""
        count, size = len(self.gaussians), num_samples or self.default_samples
        order = torch.randperm(count, generator=generator, device=generator.device).tolist()
        draws = torch.empty(size, self.layout.num_params, device=self.layout.states.device)
        for turn, member in enumerate(order[:size]):
            draws[turn::count, 0] = member
            draws[turn::count, 1:] = self.gaussians[member].sample(len(range(turn, size, count)), generator)
        return draws

    def bound_to(self, network: ModuleNetwork) -> Mixture:
        """Return the mixture bound to a network that computes the features."""
        return replace(self, layout=replace(self.layout, whole=self.layout.whole.bound_to(network)))

    def to(self, device: torch.device | str) -> Mixture:
        """Return a copy on another device."""
        layout = replace(self.layout, states=self.layout.states.to(device), heads=self.layout.heads.to(device))
        return replace(self, gaussians=[gaussian.to(device) for gaussian in self.gaussians], layout=layout)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `networks` and `heads` float32, and each Gaussian's tensors prefixed by its number; what they share as JSON."""
        tensors = {_STATES: self.layout.states.float().cpu(), _HEADS: self.layout.heads.float().cpu()}
        members = []
        for number, gaussian in enumerate(self.gaussians):
            own, meta = gaussian.to_tensors()
            tensors |= {f"{number}.{name}": tensor for name, tensor in own.items()}
            members.append(meta)
        meta = {"type": self.type, "default_samples": self.default_samples, **self.layout.to_meta()}
        return tensors, {**meta, "members": members}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: Mapping[str, Any]) -> Mixture:
        """Invert to_tensors."""
        head, whole = HeadLayout.from_meta(meta["head"]), ModuleLayout.from_meta(meta)
        gaussians: list[Any] = []
        for number, member in enumerate(meta["members"]):
            lead = f"{number}."
            own = {name.removeprefix(lead): one for name, one in tensors.items() if name.startswith(lead)}
            gaussians.append(Gaussian.from_tensors(own, member))
        if not gaussians or any(one.layout != head for one in gaussians) or len(gaussians) != len(tensors[_STATES]):
            raise ValueError("its members have different layouts, or their number does not match its networks")
        return cls(gaussians, MemberLayout(head, whole, tensors[_STATES], tensors[_HEADS]))

    def _numbered(self, thetas: Sequence[Tensor]) -> Tensor:
        numbers = torch.arange(len(thetas), dtype=torch.float64, device=self.layout.states.device)
        return torch.cat([numbers.unsqueeze(1), torch.stack(list(thetas)).double()], dim=1)
