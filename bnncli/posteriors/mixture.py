"""A Gaussian over the last layer of each of several networks that were trained apart, with equal weight: a mixture of Laplace approximations.

Eschenhagen, Daxberger, Hennig and Kristiadi (2021, arXiv:2111.03577), here with Gaussians over the last layers. The predictive is the mean
of the members' own, each by its own features.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout, LogitMaker, ParamPart, consecutive, parts_to_json
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.posteriors.gaussian import Gaussian
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

_DRAWS = 1000  # of all members together, about
_MOST_ELEMENTS = 2**26  # of these
_STATES, _HEADS = "networks", "heads"


@dataclass(frozen=True)
class MemberLayout:
    """theta is the number of a member, then the last layer's parameters in its place.

    Args:
        head: the last layer's layout.
        whole: of all parameters and buffers of a network.
        states: (M, W) float32, those of each member.
        heads: (M, H) float32, the last layers that the members were trained with.
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
        """P: 1 + H."""
        return 1 + self.head.num_params

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """The member's number, and the head's parts behind it."""
        return consecutive(
            [("member", (), False), *((part.name, part.shape, part.is_bias) for part in self.head.parts)]
        )

    @property
    def num_features(self) -> int:
        """Numbers in one input of the networks."""
        return self.whole.num_features

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one input of the networks."""
        return self.whole.input_shape

    @property
    def num_outputs(self) -> int:
        """K."""
        return self.head.num_outputs

    @property
    def takes_any_length(self) -> bool:
        """Whether an input may have more or fewer numbers: texts."""
        return self.whole.takes_any_length

    @property
    def likelihood_name(self) -> str | None:
        """The name of the outputs' likelihood, None where their number says it."""
        return self.head.likelihood_name

    @property
    def likelihood(self) -> Likelihood:
        """What the K logits say of a label."""
        return self.head.likelihood

    @property
    def num_classes(self) -> int:
        """Classes that the likelihood tells apart."""
        return self.head.num_classes

    @property
    def widest(self) -> int:
        """Numbers that an example leaves in a forward pass of a network."""
        return self.whole.widest

    def can_replace(self, head: HeadLayout) -> bool:
        """True: it brings its own networks."""
        return True

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """Sizes and names of both layouts as JSON."""
        return {**self.whole.to_meta(), "head": self.head.to_meta()}

    def features(self, member: int, inputs: Tensor) -> Tensor:
        """What a member's last layer takes, (n, D), of inputs (n, ...)."""
        return self.whole.features(inputs, self.states[member], *self.head.split(self.heads[member]))

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of inputs (N, D), flat, under theta (S, P)."""
        return self.logit_draws(theta)(features)[1](slice(0, len(theta))).transpose(1, 2)

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """The logits under each of theta (S, P); the features of each member are made once a block of inputs.

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
        gaussians: of the members, M of them.
        layout: of the draws.
    """

    type: ClassVar[str] = "mixture"
    gaussians: Sequence[Gaussian[HeadLayout]]
    layout: MemberLayout

    @property
    def default_samples(self) -> int:
        """About a thousand draws, as many of each member; fewer of large heads."""
        wanted = min(_DRAWS, max(32, _MOST_ELEMENTS // self.layout.num_params))
        return len(self.gaussians) * math.ceil(wanted / len(self.gaussians))

    @property
    def centers(self) -> Tensor:
        """Each member's number and its Gaussian's mean, (M, P) float64: the mean of their logits is that of all draws."""
        return self._numbered([gaussian.mean for gaussian in self.gaussians])

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Draws (S, P) float32 that take the members in turn, in a seeded order, so that each has its share of any stretch of them."""
        count, size = len(self.gaussians), num_samples or self.default_samples
        order = torch.randperm(count, generator=generator, device=generator.device).tolist()
        draws = torch.empty(size, self.layout.num_params, device=self.layout.states.device)
        for turn, member in enumerate(order[:size]):
            draws[turn::count, 0] = member
            draws[turn::count, 1:] = self.gaussians[member].sample(len(range(turn, size, count)), generator)
        return draws

    def bound_to(self, network: ModuleNetwork) -> Mixture:
        """The same with that network to make features by."""
        return replace(self, layout=replace(self.layout, whole=self.layout.whole.bound_to(network)))

    def to(self, device: torch.device | str) -> Mixture:
        """A copy on another device."""
        layout = replace(self.layout, states=self.layout.states.to(device), heads=self.layout.heads.to(device))
        return replace(self, gaussians=[gaussian.to(device) for gaussian in self.gaussians], layout=layout)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`networks` and `heads` float32, and each Gaussian's tensors behind its number; what describes all of them as JSON."""
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
        """The inverse of to_tensors."""
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
