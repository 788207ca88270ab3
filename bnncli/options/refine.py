"""Options of refine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bnncli.options.declaration import collected, option
from bnncli.options.parts import Setting
from bnncli.options.target import SearchedPriorOptions

# Of several flows.
RANK = Setting("Rank of the flow's update; {default} by default", int, 16, minimum=1, at_most="num_params", place=10)
HIDDEN = Setting("Hidden units of the flow's network; {default} by default", int, 64, minimum=1, place=20)

TRIAL_DRAWS = 256  # that judge a prior precision on val; fewer of large heads
BASE = "laplace"  # the default base of the last layer, and what that of other layers begins with


@dataclass(frozen=True)
class RefineOptions(SearchedPriorOptions):
    """Options of refine, `settings` being those that flows declare."""

    may_follow_base: ClassVar[bool] = True
    base: str = option(
        BASE,
        "Gaussian to refine: an artifact's name or file, or `prior` (the prior itself). By default that of \0layers\0 (all: laplace-all); "
        "it is over the same layers, and says them where \0layers\0 is left out.",
        metavar="NAME|FILE|prior",
        numeric=False,
    )
    flow: str | None = option(
        None,
        "Flow layer. affine, a learned shift and linear scale, gains most where a Gaussian is not enough; radial, the published one, moves "
        "little. By default affine; radial over other layers than the last, without \0subspace\0 or settings of another.",
        family="flows",
    )
    length: int | None = option(
        None, "Number of flow layers; the flow's own choice by default (affine: 2, radial: 5).", minimum=1
    )
    epochs: int | None = option(
        None,
        "Passes over the training split, at most; the flow's own choice by default (affine: 600, radial: 20).",
        minimum=1,
    )
    batch_size: int | None = option(
        None,
        "Examples a step, all where it is larger than the split; the flow's own choice by default (affine: 65536, radial: 128).",
        minimum=1,
    )
    learning_rate: float | None = option(
        None,
        "First learning rate of Adam, which decays to 0 along a cosine; the flow's own choice by default (affine: 0.03, radial: 0.001).",
        minimum=1e-12,
    )
    patience: int = option(
        5,
        "End early when the ELBO has stood still for this many rounds (epochs, or 25 steps where an epoch has fewer); 0 never does.",
        minimum=0,
    )
    space: str = option(
        "auto",
        "Where the flow acts: coordinates whitened by the base, or weight space; auto is the flow's own choice.",
        choices=("auto", "whitened", "weight"),
    )
    subspace: int | None = option(
        None,
        "Let the flow act in this many directions alone, those in which the base has the largest variance; in all others the base stays "
        "as it is. By default it acts in all.",
        minimum=1,
        numeric=False,  # recorded where it is given
    )
    settings: dict[str, Any] = collected("flows", recorded=("rank", "hidden", "scale"))
    num_draws: int | None = option(
        None, "Draws from the flow a step; the flow's own choice by default (affine: 8, radial: 1).", minimum=1
    )
    elbo_draws: int | None = option(
        None,
        "Fresh draws for the ELBO before and after, on the full data; up to 16 times as many where they do not decide whether it helped. 256 "
        "by default, over other layers than the last 32: each is a pass of the whole network over the data.",
        minimum=2,
    )
    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every round.",
        minimum=0,
        numeric=False,
    )

    @property
    def chosen_flow(self) -> str:
        """The flow that was asked for, or the default one.

        All of a network's weights are not moved as far as affine flows do unless that was asked for: the prior precision that suits
        linearised predictions is far from that of a target whose draws predict well.
        """
        if self.flow is not None:
            return self.flow
        is_asked = any(value is not None for value in self.settings.values())  # of which radial flows have none
        return "affine" if self.is_last_layer or self.subspace is not None or is_asked else "radial"

    @property
    def trial_epochs(self) -> int:
        """Epochs of a short refinement that tries a prior precision and goes on from a neighbour's layers, of a resolved recipe.

        On 397 digits under six priors the val NLL is within .007 of that of all epochs.
        """
        return -(-(self.epochs or 1) // 8)

    @property
    def num_elbo_draws(self) -> int:
        """The draws that were asked for, or the default ones."""
        if self.elbo_draws is not None:
            return self.elbo_draws
        return 256 if self.is_last_layer else 32

    @property
    def default_base(self) -> str:
        """The name of the base that fit-laplace makes of these layers."""
        return f"{BASE}{self.layers_suffix}"

    def params(self) -> dict[str, Any]:
        """The options that change numbers."""
        inside = {} if self.subspace is None else {"subspace": self.subspace}
        return {**super().params(), **self.layers_params, **inside}
