"""Options of calibrate."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli import detectors
from bnncli.decisions import KINDS, LAC, OOD, RAPS, RISK, SCHEMES, SETS, SHIFT
from bnncli.errors import UsageError
from bnncli.names import percent
from bnncli.options.declaration import Checked, check_split_name, option
from bnncli.options.predicted import check_variant

DEFAULT_CONFIDENCE = 0.95  # of a bound on the risk, which without one is none
TUNING_SHARE = 0.2  # of the calibration examples, that choose how raps is regularised


def _scores() -> tuple[str, ...]:
    return tuple(detectors.of_predictions())


@dataclass(frozen=True)
class CalibrateOptions(Checked):
    """Options of calibrate."""

    split: str = option(
        "calib",
        "Split to calibrate on: in-distribution examples that nothing was fitted to, tuned on or chosen by.",
        metavar="SPLIT",
        numeric=False,
    )
    posterior: str | None = option(
        None,
        "Posterior whose predictions are decided on; by default what auto recommends, every one that has predicted the split where it has recommended nothing.",
        metavar="NAME",
        numeric=False,
    )
    integrator: str | None = option(
        None,
        "Only this integrator's predictions: a name (mc), or one with its settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        numeric=False,
    )
    sets: str | None = option(
        None,
        "Prediction sets that hold the class: lac (the smallest on average), aps (larger for what is harder), raps (aps without the long tail).",
        choices=SCHEMES,
    )
    coverage: float = option(0.9, "Share of examples whose class is in their set.", minimum=0, maximum=1)
    class_conditional: bool = option(False, "The same coverage for every class, by a threshold of its own.")
    nonempty: bool = option(
        False, "Put the most probable class into sets that would be empty: coverage only rises, and sets are larger."
    )
    nonrandomized: bool = option(
        False, "aps and raps without the uniform number an example that makes their coverage exact: larger sets."
    )
    raps_penalty: float | None = option(
        None,
        f"Penalty of raps of each rank (lambda); a seeded {percent(TUNING_SHARE, 'g')} of the split chooses it.",
        minimum=0,
    )
    raps_rank: int | None = option(
        None,
        f"Ranks of raps without a penalty (k_reg); a seeded {percent(TUNING_SHARE, 'g')} of the split chooses it.",
        minimum=0,
    )
    risk: float | None = option(
        None,
        "Accept predictions of which at most this share is wrong, by the largest probability.",
        minimum=0,
        maximum=1,
    )
    false_alarm: float | None = option(
        None, "Call at most this share of in-distribution examples out-of-distribution.", minimum=0, maximum=1
    )
    shift_level: float | None = option(
        None, "Raise an alarm for a batch that has not shifted with at most this probability.", minimum=0, maximum=1
    )
    confidence: float | None = option(
        None,
        f"Share of calibration splits for which a level holds, instead of on average over them; of \0risk\0 {DEFAULT_CONFIDENCE} by default.",
        minimum=0,
        maximum=1,
    )
    score: str | None = option(
        None,
        "Score of each prediction that \0false_alarm\0 and \0shift_level\0 go by: combined by default, mutual_info or max_prob where "
        "predictions lack it.",
        choices=_scores,
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
                "nothing to calibrate: expected \0sets\0, \0risk\0, \0false_alarm\0 or \0shift_level\0, one or several",
                hint="add \0sets\0 lac \0coverage\0 0.9",
            )
        of_sets = {name: getattr(self, name) for name in ("class_conditional", "nonempty", "nonrandomized")}
        of_raps = {"raps_penalty": self.raps_penalty, "raps_rank": self.raps_rank}
        for name, value in {**of_sets, **of_raps}.items():
            if value not in (None, False) and self.sets is None:
                raise UsageError(f"\0{name}\0 is of prediction sets: add \0sets\0 {RAPS if name in of_raps else 'aps'}")
        if self.nonrandomized and self.sets == LAC:
            raise UsageError("\0nonrandomized\0: lac is not randomised; it is of aps and raps")
        given = [name for name, value in of_raps.items() if value is not None]
        if given and self.sets != RAPS:
            raise UsageError(f"\0{given[0]}\0 is of raps: add \0sets\0 raps")
        if len(given) == 1:
            raise UsageError(
                "\0raps_penalty\0 and \0raps_rank\0 go together: give both, or neither to have them chosen"
            )

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
