"""Options of integrals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, check_suffix, option

MAX_LOGITS = 1000


@dataclass(frozen=True)
class IntegralsOptions(Checked):
    """Options of integrals: one Gaussian over logits, or without --mean a grid of them."""

    mean: str | None = option(
        None,
        "Means of the logits, joined by commas: one (sigmoid), or one per class (softmax).",
        metavar="M,...",
    )
    variance: str | None = option(
        None, "Variances of independent logits: one per mean, or one for all.", metavar="V,..."
    )
    covariance: str | None = option(
        None,
        "Covariance matrix of the logits, in place of variances: rows joined by semicolons, such as '2,1;1,2'.",
        metavar="V,...;V,...",
    )
    integrator: list[str] = option(
        [],
        "Integrator to measure, in all its variants. Default: all integrators that need no training data.",
        family="integrators",
    )
    samples: int = option(100, "Number of draws for sampling integrators.", minimum=1)
    grid_size: int = option(
        80,
        "Without \0mean\0: number of standard deviations on the grid. The number of means is one higher.",
        minimum=2,
        maximum=1000,
        is_rare=True,
    )
    max_mean: float = option(10.0, "Largest mean on the grid.", minimum=1e-6, maximum=1e6, is_rare=True)
    max_sd: float = option(10.0, "Largest standard deviation on the grid.", minimum=1e-6, maximum=1e6, is_rare=True)
    plot: str | None = option(
        None,
        "Plot the errors on the grid as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
    )
    force: bool = option(False, "Let \0plot\0 replace a file that bnncli did not create.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))

    def check_together(self) -> None:
        """Pass when the options that are given belong together. Raises UsageError otherwise."""
        if self.mean is None and (self.variance is not None or self.covariance is not None):
            raise UsageError("\0variance\0 and \0covariance\0 need \0mean\0; without all three a grid is computed")
        if self.mean is not None and self.plot is not None:
            raise UsageError("\0plot\0 draws the grid: drop \0mean\0")
        if self.mean is not None and (self.variance is None) == (self.covariance is None):
            raise UsageError("\0mean\0: give either \0variance\0 or \0covariance\0 with it")

    @property
    def moments(self) -> tuple[list[float], list[list[float]]]:
        """Means (K) and covariance (K, K) of the logits; that it has no negative eigenvalue is not checked here."""
        mean = _numbers(self.mean or "", "\0mean\0")
        if len(mean) > MAX_LOGITS:
            raise UsageError(f"\0mean\0: expected at most {MAX_LOGITS} logits; got {len(mean)}")
        if self.variance is not None:
            return mean, _diagonal(_numbers(self.variance, "\0variance\0"), len(mean))
        rows = [_numbers(row, "\0covariance\0") for row in (self.covariance or "").split(";")]
        if len(rows) != len(mean) or any(len(row) != len(mean) for row in rows):
            raise UsageError(
                f"\0covariance\0: expected {len(mean)} rows of {len(mean)} numbers, one per mean; got "
                f"{self.covariance!r}"
            )
        if any(abs(rows[i][j] - rows[j][i]) > 1e-9 * abs(rows[i][j]) for i in range(len(rows)) for j in range(i)):
            raise UsageError("\0covariance\0: expected a symmetric matrix")
        return mean, rows


def _diagonal(variances: list[float], count: int) -> list[list[float]]:
    if len(variances) == 1:
        variances = variances * count
    if len(variances) != count:
        raise UsageError(f"\0variance\0: expected one number, or {count} (one per mean); got {len(variances)}")
    if min(variances) < 0:
        raise UsageError(f"\0variance\0: expected numbers of at least 0; got {min(variances):g}")
    return [[variances[i] if i == j else 0.0 for j in range(count)] for i in range(count)]


def _numbers(text: str, flag: str) -> list[float]:
    """The finite numbers in a list joined by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and abs(value) <= 1e100 for value in values):
        raise UsageError(f"{flag}: expected finite numbers joined by commas; got {text!r}")
    return values
