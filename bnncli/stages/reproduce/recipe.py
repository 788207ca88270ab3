"""What a recipe says: where numbers were published, what to run for them, and by which rules they are judged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncli.errors import ConfigError
from bnncli.evaluation.agreement import Estimate

_CALLED = re.compile(r"\[name=([^,\]]+)")


@dataclass(frozen=True)
class Needs:
    """Files, by the names that values have for them: as `data/fmnist-train.npz`, a place and a file.

    Args:
        required: nothing runs without them. optional: what refers to them is left out without.
    """

    required: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedArrays:
    """An NPZ file that an experiment makes for the steps: values have it by its name."""

    name: str
    experiment: str


@dataclass(frozen=True)
class Study:
    """Commands on checkpoints, whose results several recipes read.

    Args:
        seconds: by scale, about, on two cores; only of scales that were timed.
        needs, settings: by scale.
        steps: of a grid, with $NAME for settings and files.
    """

    name: str
    path: Path
    title: str
    seconds: Mapping[str, float]
    needs: Mapping[str, Needs]
    settings: Mapping[str, Mapping[str, Any]]
    prepared: tuple[PreparedArrays, ...]
    steps: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Reading:
    """Where a number stands in the document of a step.

    Args:
        value, error, count: paths in it, of the number, its standard error, and how many values are behind that; None where the
            document has none.
        trials: path of how many trials the number is a share of, in what trials_step has said, or the same step: its standard error is
            theirs, in the place of `error`.
        pairs: path of its correlations with the same score of others, by their names.
    """

    study: str
    step: str
    value: str
    error: str | None = None
    count: str | None = None
    trials: str | None = None
    trials_step: str | None = None
    pairs: str | None = None

    @property
    def called(self) -> str:
        """The first name among the conditions of `pairs`, by which others have their correlation with it."""
        found = _CALLED.search(self.pairs or "")
        return found[1] if found else ""

    @property
    def kind(self) -> tuple[str, str, str]:
        """What it has in common with the numbers that it is correlated with: all but the name."""
        return self.study, self.step, _CALLED.sub("[name=", self.pairs or "", count=1)


@dataclass(frozen=True)
class Cell:
    """One published number.

    Args:
        published: with its standard error where one was published.
        tolerance: how far ours may be for reasons that are known, in the number's unit. because: these reasons.
        formulas: of measured numbers, by definition; empty where it cannot be measured.
        unavailable: why that is.
        needs: optional files that it takes.
        not_at: scales at which the number is of something else, so that it is shown and not judged, each with why.
    """

    row: str
    column: str
    published: Estimate
    tolerance: float
    because: str
    formulas: Mapping[str, str]
    unavailable: str | None
    needs: tuple[str, ...]
    not_at: Mapping[str, str]

    @property
    def is_coarse(self) -> bool:
        """Whether the tolerance is as large as the number, which what is near nothing reproduces then."""
        return 0 < abs(self.published.value) <= self.tolerance


@dataclass(frozen=True)
class Claim:
    """One statement of the text, in our words.

    Args:
        rule: comparisons of formulas, joined by and, or.
        where: the text says so.
        not_at: scales at which the numbers cannot tell, so that they are shown and not judged, each with why.
        needs: optional files that it takes.
    """

    name: str
    text: str
    where: str
    rule: str
    not_at: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LineFigure:
    """Measured numbers against something, a line for each of some names: formulas at the places x; log: axes that are logarithmic."""

    name: str
    title: str
    x: tuple[float, ...]
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[str, ...]]
    log: str = ""


@dataclass(frozen=True)
class MarginalFigure:
    """Densities of single weights. posteriors: names of those of the study's first checkpoint, by what they are called; the first is the reference."""

    name: str
    study: str
    posteriors: Mapping[str, str]


@dataclass(frozen=True)
class PaperRecipe:
    """One table or figure.

    Args:
        name: work/name. work: as it is cited. where: in it.
        note: what a reader of the results must know.
        studies: names of those whose documents it reads. experiment: the name of one, or None.
        settings, needs, seconds: of the experiment, by scale.
        reads: what its experiment reads of studies, by its names: study/file.
        measures: by name.
    """

    name: str
    path: Path
    title: str
    work: str
    where: str
    note: str
    studies: tuple[str, ...]
    experiment: str | None
    settings: Mapping[str, Mapping[str, Any]]
    needs: Mapping[str, Needs]
    seconds: Mapping[str, float]
    reads: Mapping[str, str]
    measures: Mapping[str, Reading]
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...]
    figures: tuple[LineFigure, ...]
    marginals: tuple[MarginalFigure, ...]

    def fault(self, said: str) -> ConfigError:
        """The error for something in this file."""
        return ConfigError(f"{self.path}: {said}", path=self.path)
