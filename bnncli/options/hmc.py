"""Options of hmc."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import option
from bnncli.options.shared import Condition, SearchedPriorOptions, TargetOptions, parse_until

_TRIED_DRAWS = 256  # of all chains together


@dataclass(frozen=True)
class HmcOptions(SearchedPriorOptions, TargetOptions):
    """Options of hmc."""

    base: str | None = option(
        None,
        "Artifact whose prior defines the target, and whose Gaussian whitens the parameters. Default: laplace, "
        "or laplace-all for \0layers\0 all.",
        metavar="NAME|FILE",
        numeric=False,
        group="Target",
    )
    chains: int = option(16, "Number of chains, run as one batch.", minimum=1, group="Sampling")
    warmup: int = option(60, "Number of warm-up draws per chain, which are discarded.", minimum=1, group="Sampling")
    draws: int = option(260, "Draws to keep per chain.", minimum=4, group="Sampling")
    until: str | None = option(
        None,
        "Keep drawing until these conditions hold, such as rhat<=1.01,ess>=400 (also ess-tail>=NUMBER). Exit 3 "
        "if \0max_draws\0 is reached first.",
        metavar="CONDITIONS",
        group="Sampling",
    )
    max_draws: int | None = option(
        None, "Maximum draws per chain with \0until\0. Default: 20 times \0draws\0.", minimum=4, group="Sampling"
    )
    target_accept: float = option(
        0.9,
        "Target acceptance rate for step size adaptation.",
        minimum=0.1,
        maximum=0.99,
        group="Sampling",
        is_rare=True,
    )
    dynamics: str = option(
        "split",
        "Integrator of the dynamics: split (exact Gaussian part) or leapfrog.",
        choices=("split", "leapfrog"),
        group="Sampling",
        is_rare=True,
    )
    gradients: str = option(
        "float32",
        "Precision of the gradients that move the chains. The acceptance step stays in float32, so the "
        "posterior does not change.",
        choices=("float32", "tf32", "bfloat16"),
        group="Sampling",
        is_rare=True,
    )
    sampler: str = option(
        "hmc",
        "Sampler. nuts is Pyro's implementation, a slow independent reference.",
        choices=("hmc", "nuts"),
        group="Sampling",
        is_rare=True,
    )
    max_rhat: float | None = option(
        None, "Exit 3 if the largest R-hat is above this value.", minimum=1.0, numeric=False, group="Sampling"
    )
    spread: str | None = option(
        None,
        "What torchrun workers split: chains, or examples. Default: chains, unless the data do not fit on one GPU.",
        choices=("chains", "examples"),
        numeric=False,
        group="Sampling",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Sampling"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every draw.",
        minimum=0,
        numeric=False,
        group="Sampling",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler == "nuts" and self.dynamics != "split":
            raise UsageError("\0dynamics\0 is for \0sampler\0 hmc")
        if self.sampler == "nuts" and self.gradients != "float32":
            raise UsageError("\0gradients\0 is for \0sampler\0 hmc")
        if not self.is_last_layer and self.gradients != "float32":
            raise UsageError("\0gradients\0 is for the last layer; other layers use float32")
        if self.sampler == "nuts" and (self.until is not None or self.resume):
            raise UsageError("\0until\0 and \0resume\0 are for \0sampler\0 hmc; nuts runs its chains one after another")
        if self.sampler == "nuts" and self.spread == "chains":
            raise UsageError("\0spread\0 chains is for \0sampler\0 hmc; workers of nuts split the examples")
        if not self.is_last_layer and self.spread == "examples":
            raise UsageError("\0spread\0 examples is for the last layer; use chains for other layers")
        if self.max_draws is not None and self.max_draws < self.draws:
            raise UsageError(f"\0max_draws\0: expected at least \0draws\0 ({self.draws}); got {self.max_draws}")
        if any(condition.name == "rhat" for condition in self.conditions) and self.chains == 1:
            raise UsageError("\0until\0: rhat needs at least two \0chains\0")

    @property
    def tried(self) -> tuple[int, int]:
        """Warm-up and draws of a short run that tries a prior precision, of each chain.

        Chains go on from a neighbouring prior's, so that a dozen transitions settle them: on 397 digits the val NLL is within .005 of that
        of 260 draws.
        """
        return min(12, self.warmup), min(self.draws // 4, -(-_TRIED_DRAWS // self.chains))

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What --until asks for; nothing without it."""
        return () if self.until is None else parse_until(self.until, "\0until\0")
