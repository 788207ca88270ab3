"""Options of refine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bnncli.options.declaration import collected, option
from bnncli.options.shared import SearchedPriorOptions

# Of several flows.

TRIAL_DRAWS = 256  # that judge a prior precision on val; fewer of large heads
BASE = "laplace"  # the default base of the last layer, and what that of other layers begins with


@dataclass(frozen=True)
class RefineOptions(SearchedPriorOptions):
    """Options of refine, `settings` being those that flows declare."""

    may_follow_base: ClassVar[bool] = True
    base: str = option(
        BASE,
        "Gaussian to refine, by name or file, or `prior`. Default: laplace, or laplace-all for \0layers\0 all.",
        metavar="NAME|FILE|prior",
        numeric=False,
        group="Target",
    )
    flow: str | None = option(
        None,
        "Flow. Default: affine (shift and linear map); radial for other layers without \0subspace\0.",
        family="flows",
        group="Flow",
    )
    length: int | None = option(None, "Number of flow layers. Default: affine 2, radial 5.", minimum=1, group="Flow")
    epochs: int | None = option(
        None, "Maximum passes over the training split. Default: affine 600, radial 20.", minimum=1, group="Training"
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: affine 65536, radial 128.", minimum=1, group="Training", is_rare=True
    )
    learning_rate: float | None = option(
        None,
        "Initial learning rate of Adam, with cosine decay. Default: affine 0.03, radial 0.001.",
        minimum=1e-12,
        group="Training",
    )
    patience: int = option(
        5,
        "Stop after this many rounds without a better ELBO (a round is an epoch, or 25 steps). With 0, never "
        "stop early.",
        minimum=0,
        group="Training",
        is_rare=True,
    )
    space: str = option(
        "auto",
        "Coordinates in which the flow works: whitened by the base posterior, or the weights themselves. auto "
        "uses the flow's default.",
        choices=("auto", "whitened", "weight"),
        group="Flow",
        is_rare=True,
    )
    subspace: int | None = option(
        None,
        "Restrict the flow to this many directions, those with the largest variance. Default: all directions.",
        minimum=1,
        numeric=False,  # recorded where it is given
        group="Flow",
    )
    settings: dict[str, Any] = collected("flows", recorded=("rank", "hidden", "scale"))
    num_draws: int | None = option(
        None, "Draws per step. Default: affine 8, radial 1.", minimum=1, group="Training", is_rare=True
    )
    elbo_draws: int | None = option(
        None,
        "Draws for the ELBO before and after refining; up to 16 times as many are used if the gain is unclear. "
        "Default: 256; other layers 32.",
        minimum=2,
        group="Training",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Training"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every round.",
        minimum=0,
        numeric=False,
        group="Training",
        is_rare=True,
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
