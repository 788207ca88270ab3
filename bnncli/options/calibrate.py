"""Options of calibrate."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.decisions import KINDS, LAC, OOD, RAPS, RISK, SCHEMES, SETS, SHIFT
from bnncli.errors import UsageError
from bnncli.evaluation import detectors
from bnncli.names import percent
from bnncli.options.declaration import Checked, check_split_name, option
from bnncli.options.shared import check_variant

DEFAULT_CONFIDENCE = 0.95  # of a bound on the risk, which without one is none
TUNING_SHARE = 0.2  # of the calibration examples, that choose how raps is regularised


def _scores() -> tuple[str, ...]:
    return tuple(detectors.of_predictions())


@dataclass(frozen=True)
class CalibrateOptions(Checked):
    """Options of calibrate."""

    split: str = option(
        "calib",
        "Split to calibrate on. Its examples must not have been used for fitting or model selection.",
        metavar="SPLIT",
        numeric=False,
        group="Predictions",
    )
    posterior: str | None = option(
        None,
        "Posterior whose predictions to calibrate. Default: auto's recommendation, else every posterior that "
        "predicted the split.",
        metavar="NAME",
        numeric=False,
        group="Predictions",
    )
    integrator: str | None = option(
        None,
        "Calibrate only this integrator's predictions: a name (mc), or a name with settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        numeric=False,
        group="Predictions",
    )
    sets: str | None = option(
        None,
        "Calibrate prediction sets: lac (smallest on average), aps (larger for harder examples) or raps (aps "
        "without the long tail).",
        choices=SCHEMES,
        group="Prediction sets",
    )
    coverage: float = option(
        0.9, "Share of examples whose class must be in their set.", minimum=0, maximum=1, group="Prediction sets"
    )
    class_conditional: bool = option(
        False, "Guarantee the coverage for each class separately.", group="Prediction sets"
    )
    nonempty: bool = option(
        False,
        "Add the most probable class to empty sets. This never lowers the coverage.",
        group="Prediction sets",
        is_rare=True,
    )
    nonrandomized: bool = option(
        False,
        "Do not randomise aps and raps. The sets become larger and their coverage is no longer exact.",
        group="Prediction sets",
        is_rare=True,
    )
    raps_penalty: float | None = option(
        None,
        f"Penalty per rank (lambda) of raps. Default: tuned on {percent(TUNING_SHARE, 'g')} of the split.",
        minimum=0,
        group="Prediction sets",
        is_rare=True,
    )
    raps_rank: int | None = option(
        None,
        f"Number of unpenalised ranks (k_reg) of raps. Default: tuned on {percent(TUNING_SHARE, 'g')} of the split.",
        minimum=0,
        group="Prediction sets",
        is_rare=True,
    )
    risk: float | None = option(
        None,
        "Accept predictions so that at most this share of the accepted ones is wrong.",
        minimum=0,
        maximum=1,
        group="Acceptance, outliers and shift",
    )
    false_alarm: float | None = option(
        None,
        "Flag at most this share of in-distribution examples as out-of-distribution.",
        minimum=0,
        maximum=1,
        group="Acceptance, outliers and shift",
    )
    shift_level: float | None = option(
        None,
        "Raise a shift alarm for at most this share of batches that have not shifted.",
        minimum=0,
        maximum=1,
        group="Acceptance, outliers and shift",
    )
    confidence: float | None = option(
        None,
        f"Confidence that the guarantee holds for this calibration split. Default: {DEFAULT_CONFIDENCE} for "
        "\0risk\0; other rules hold on average over calibration splits.",
        minimum=0,
        maximum=1,
        group="Acceptance, outliers and shift",
    )
    score: str | None = option(
        None,
        "Score for \0false_alarm\0 and \0shift_level\0. Default: combined, else mutual_info or max_prob.",
        choices=_scores,
        group="Acceptance, outliers and shift",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split_name(self.split, "\0split\0")
        for name in ("coverage", "risk", "false_alarm", "shift_level", "confidence"):
            if getattr(self, name) in (0, 1):
                raise UsageError(f"\0{name}\0: expected a number between 0 and 1; got {getattr(self, name):g}")

    def check_together(self) -> None:
        """Raise UsageError where nothing is asked for, or for an option that only means something beside another one."""
        if not self.kinds:
            raise UsageError(
                "nothing to calibrate: expected \0sets\0, \0risk\0, \0false_alarm\0 or \0shift_level\0",
                hint="add \0sets\0 lac \0coverage\0 0.9",
            )
        of_sets = {name: getattr(self, name) for name in ("class_conditional", "nonempty", "nonrandomized")}
        of_raps = {"raps_penalty": self.raps_penalty, "raps_rank": self.raps_rank}
        for name, value in {**of_sets, **of_raps}.items():
            if value not in (None, False) and self.sets is None:
                raise UsageError(
                    f"\0{name}\0 applies to prediction sets: add \0sets\0 {RAPS if name in of_raps else 'aps'}"
                )
        if self.nonrandomized and self.sets == LAC:
            raise UsageError("\0nonrandomized\0 applies to \0sets\0 aps and raps; lac is not randomised")
        given = [name for name, value in of_raps.items() if value is not None]
        if given and self.sets != RAPS:
            raise UsageError(f"\0{given[0]}\0 applies to raps: add \0sets\0 raps")
        if len(given) == 1:
            raise UsageError("\0raps_penalty\0 and \0raps_rank\0 go together: give both, or neither to tune them")

    @property
    def kinds(self) -> list[str]:
        """The rules that are asked for, of KINDS."""
        asked = {SETS: self.sets, RISK: self.risk, OOD: self.false_alarm, SHIFT: self.shift_level}
        return [kind for kind in KINDS if asked[kind] is not None]

    @property
    def is_tuned(self) -> bool:
        """Whether a part of the split chooses how raps is regularised."""
        return self.sets == RAPS and self.raps_penalty is None

    def settings(self, kind: str, seed: int) -> dict[str, object]:
        """What one of the rules is made with: what its file records, and what tells another request from it."""
        if kind == SETS:
            is_seeded = self.is_tuned or not (self.sets == LAC or self.nonrandomized)
            regularised = {"penalty": self.raps_penalty, "free_ranks": self.raps_rank} if self.sets == RAPS else {}
            return {
                "sets": self.sets,
                "coverage": self.coverage,
                "class_conditional": self.class_conditional,
                "nonempty": self.nonempty,
                "randomized": not (self.sets == LAC or self.nonrandomized),
                "confidence": self.confidence,
                "seed": seed if is_seeded else None,
                **regularised,
            }
        if kind == RISK:
            return {"risk": self.risk, "confidence": self.confidence or DEFAULT_CONFIDENCE}
        if kind == OOD:
            return {"false_alarm": self.false_alarm, "confidence": self.confidence, "score": self.score}
        return {"shift_level": self.shift_level, "score": self.score}
