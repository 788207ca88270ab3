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
        "Posterior whose fit is tried, by name or file: of fit-laplace, refine, hmc, fit-vi, fit-swag, fit-sghmc or fit-lbbnn, over the last layer. Its method, options and prior "
        "are taken, not its numbers; of hmc not the lengths of its chains; of fit-sghmc as many more chains as give \0draws\0 that are nearly independent; "
        "of fit-lbbnn a slab that val chose as well, and epochs that it chose itself anew for as many examples. By default one of those takes a core 0.4 s a simulation of 18 parameters, 1.7 s of 850.",
        metavar="NAME|FILE",
    )
    truth: str = option(
        PRIOR,
        "Where the parameters come from that labels are simulated by: prior, or a posterior of this run, by name or file; then the observed "
        "labels are kept beside the simulated ones. Its draws must be exact for ranks to be uniform: take hmc. Fits of fit-lbbnn have prior alone.",
        metavar="prior|NAME|FILE",
    )
    simulations: int = option(500, "Data sets simulated and fitted.", minimum=20)
    draws: int = option(100, "Draws of each fit, among which the truth is ranked.", minimum=9, maximum=10_000)
    examples: int = option(
        500, "Training examples, chosen at random, that get simulated labels; all where there are fewer.", minimum=1
    )
    level: float = option(
        0.05,
        "Probability that a fit with nothing wrong is said to be wrong, all quantities together.",
        minimum=1e-6,
        maximum=0.5,
    )
    strict: bool = option(False, "Exit 3 where the fit is not calibrated.")
    plot: str | None = option(
        None,
        "Draw the ranks' distribution functions less that of uniform ranks, with their bands, as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
    )
    force: bool = option(False, "Let \0plot\0 replace a file that is no figure of bnncli.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))
