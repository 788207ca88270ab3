"""Options of hmc."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import option
from bnncli.options.target import SearchedPriorOptions, TargetOptions
from bnncli.options.until import Condition, parse_until

_TRIED_DRAWS = 256  # of all chains together


@dataclass(frozen=True)
class HmcOptions(SearchedPriorOptions, TargetOptions):
    """Options of hmc."""

    base: str | None = option(
        None,
        "Artifact whose prior defines the target: laplace by default, or for \0layers\0 all or a pattern the one that fit-laplace makes of these layers (laplace-all), whose Gaussian also whitens.",
        metavar="NAME|FILE",
        numeric=False,
    )
    chains: int = option(16, "Chains, run as one batch.", minimum=1)
    warmup: int = option(60, "Draws of each chain that adapt the step size and are thrown away.", minimum=1)
    draws: int = option(260, "Draws kept of each chain.", minimum=4)
    until: str | None = option(
        None,
        "After \0draws\0 keep drawing, \0draws\0 / 2 at a time, until these hold for every parameter (of other layers than the last: for every prediction that is judged), as rhat<=1.01,ess>=400 (also ess-tail>=NUMBER). Exit 3 when \0max_draws\0 come first. The numbers that chose the stop flatter the run, and it says so.",
        metavar="CONDITIONS",
    )
    max_draws: int | None = option(
        None, "Draws of each chain at which \0until\0 gives up; 20 times \0draws\0 by default.", minimum=4
    )
    target_accept: float = option(0.9, "Acceptance that the step size aims at.", minimum=0.1, maximum=0.99)
    dynamics: str = option(
        "split",
        "split: the Gaussian at the mode moves exactly, about the mean of the chains once they have settled (the mode, where steps are very short), and only the rest is stepped; leapfrog: plain.",
        choices=("split", "leapfrog"),
    )
    gradients: str = option(
        "float32",
        "Digits of the gradients that move the chains: float32; tf32 or bfloat16, for GPUs that multiply these faster (elsewhere they are slower). Draws are of the same posterior, as the energies that accept stay float32; acceptance and effective draws tell what it costs.",
        choices=("float32", "tf32", "bfloat16"),
    )
    sampler: str = option("hmc", "hmc, or Pyro's nuts as the independent (slow) reference.", choices=("hmc", "nuts"))
    max_rhat: float | None = option(
        None,
        "Exit 3 when the largest R-hat is above this: of parameters, of other layers than the last of predictions.",
        minimum=1.0,
        numeric=False,
    )
    spread: str | None = option(
        None,
        "What workers share out (torchrun): chains, in groups of four, each over all data; or examples, of which each worker reads its part. By default chains, unless the data do not fit each worker's GPU; over other layers than the last always chains, one a group.",
        choices=("chains", "examples"),
        numeric=False,
    )
    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every draw.",
        minimum=0,
        numeric=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler == "nuts" and self.dynamics != "split":
            raise UsageError("\0dynamics\0 is for \0sampler\0 hmc; nuts has its own")
        if self.sampler == "nuts" and self.gradients != "float32":
            raise UsageError("\0gradients\0 is for \0sampler\0 hmc; nuts takes exact ones")
        if not self.is_last_layer and self.gradients != "float32":
            raise UsageError("\0gradients\0 is for the last layer; with \0layers\0 all or a pattern it is float32")
        if self.sampler == "nuts" and (self.until is not None or self.resume):
            raise UsageError("\0until\0 and \0resume\0 are for \0sampler\0 hmc; nuts runs one chain after the other")
        if self.sampler == "nuts" and self.spread == "chains":
            raise UsageError("\0spread\0 chains is for \0sampler\0 hmc; workers of nuts share out the examples")
        if not self.is_last_layer and self.spread == "examples":
            raise UsageError("\0spread\0 examples is for the last layer; with \0layers\0 all or a pattern it is chains")
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
