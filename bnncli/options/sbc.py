"""Options of sbc."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, check_suffix, option

PRIOR = "prior"


@dataclass(frozen=True)
class SbcOptions(Checked):
    """Options of sbc."""

    posterior: str = option(
        "laplace",
        "Posterior whose method and options to test, by name or file. It must be over the last layer, from any "
        "fit command.",
        metavar="NAME|FILE",
    )
    truth: str = option(
        PRIOR,
        "Where the true parameters come from: the prior, or a posterior of this run (use hmc). fit-lbbnn "
        "supports only prior.",
        metavar="prior|NAME|FILE",
    )
    simulations: int = option(500, "Number of data sets to simulate and fit.", minimum=20)
    draws: int = option(100, "Number of draws per fit, among which the truth is ranked.", minimum=9, maximum=10_000)
    examples: int = option(500, "Number of random training examples that get simulated labels.", minimum=1)
    level: float = option(
        0.05,
        "Probability of rejecting a correct fit, for all quantities together.",
        minimum=1e-6,
        maximum=0.5,
        is_rare=True,
    )
    strict: bool = option(False, "Exit 3 if the fit is not calibrated.")
    plot: str | None = option(
        None,
        "Plot the rank distributions with their bands as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
    )
    force: bool = option(False, "Let \0plot\0 replace a file that bnncli did not create.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))
