"""Options that several commands share: layers, target and prior, network inputs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.likelihoods import TASKS
from bnncli.names import unknown_value_error
from bnncli.numerics.corruptions import CORRUPTIONS, NUM_SEVERITIES
from bnncli.options.declaration import CheckedOptions, list_forms, option, parse_positive
from bnncli.parameters.module import LAST, STATE


def trust_code_option(*, is_recorded: bool = True, also: str = "", group: str = "Inputs", is_rare: bool = True) -> Any:
    """Declare --trust-code, recorded in artifacts if `is_recorded`.

    Args:
        also: another case in which the code runs, for the help text.
    """
    text = (
        "Execute the code that the run folder names (network factory, jit, py: data), needed for layers other "
        f"than the last{also}. Without this option, no such code runs."
    )
    return option(False, text, numeric=not is_recorded, group=group, is_rare=is_rare)


def check_layers(layers: str | None, where: str = "\0layers\0", *, is_read: bool = True) -> None:
    """Raise UsageError unless `layers` is last, all, patterns or None.

    Args:
        is_read: whether the option selects among existing posteriors.
    """
    if layers == STATE and not is_read:
        raise UsageError(f"{where}: {STATE} is only for fit-ensemble; buffers have no other posterior")
    if layers is not None and not all(layers.split("+")):
        raise UsageError(f"{where}: expected last, all or patterns joined by +; got {layers!r}")


def chosen_layers_option(group: str = "", *, is_recorded: bool = True, is_rare: bool = False) -> Any:
    """Declare --layers for commands that read posteriors, recorded in artifacts if `is_recorded`."""
    return option(
        None,
        "Use only posteriors over these parameters, written as in the command that fitted them.",
        metavar="last|all|PATTERN",
        check=check_layers,
        numeric=not is_recorded,
        group=group,
        is_rare=is_rare,
    )


def find_class(text: str, classes: Sequence[str], where: str) -> int:
    """Return the index of a class that is given by name or index. Raises UsageError, which starts with `where`."""
    if text in classes:
        return list(classes).index(text)
    if text.isdecimal() and int(text) < len(classes):
        return int(text)
    near = difflib.get_close_matches(text, classes, n=1)
    known = (
        f"did you mean {near[0]!r}?" if near else f"classes: {', '.join(classes[:20])}" + " ..." * (len(classes) > 20)
    )
    raise UsageError(f"{where}: no class {text!r}; {known}")


@dataclass(frozen=True)
class LayersOptions(CheckedOptions):
    r"""Options of commands that fit posteriors.

    Attributes:
        may_follow_base: whether the base determines the layers when they are omitted, so that \0trust_code\0 may stand
            alone.
    """

    may_follow_base: ClassVar[bool] = False
    layers: str = option(
        LAST,
        "Parameters of the posterior: last (linear layer), all, or patterns joined by +, such as `layer4*+fc*`. "
        "Other layers need the network and its inputs.",
        metavar="last|all|PATTERN",
        numeric=False,  # recorded if given: `layers_params`
        group="Target",
    )
    trust_code: bool = trust_code_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.layers, is_read=False)
        if not self.may_follow_base:
            self.check_trust()

    def check_trust(self) -> None:
        """Raise UsageError if trust is given but not needed."""
        if self.trust_code and self.is_last_layer:
            raise UsageError("\0trust_code\0 is for \0layers\0 all or a pattern; the last layer needs no code")

    @property
    def is_last_layer(self) -> bool:
        """Return whether the posterior needs only the features."""
        return self.layers == LAST

    @property
    def layers_params(self) -> dict[str, Any]:
        """Return the entry for request digests: empty for the last layer."""
        return {} if self.is_last_layer else {"layers": self.layers}

    @property
    def layers_suffix(self) -> str:
        """Return the suffix of the posterior's default name."""
        if self.is_last_layer:
            return ""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.layers).strip("-").lower()
        return "-" + ("-".join(filter(None, words.split("-"))) or "some")


AUTO, INHERIT = "auto", "inherit"


@dataclass(frozen=True)
class TargetOptions(LayersOptions):
    """The layers of a target, and the base that defines its prior."""

    base: str | None = option(
        None,
        "Artifact whose prior defines the target. Default: laplace, or laplace-all for \0layers\0 all.",
        metavar="NAME|FILE",
        numeric=False,
        group="Target",
    )

    @property
    def default_base(self) -> str:
        """The default base."""
        return f"laplace{self.layers_suffix}"

    @property
    def given_precision(self) -> float | None:
        """The prior precision given as a number."""
        return None

    def params(self) -> dict[str, Any]:
        """Return the options that change numbers."""
        return {**super().params(), **self.layers_params}


@dataclass(frozen=True)
class GivenPriorOptions(TargetOptions):
    """Target options with a prior precision that may replace the base's."""

    prior_precision: float | None = option(
        None,
        "Prior precision of the target, biases included. Default: the base's prior.",
        minimum=1e-30,
        group="Target",
    )

    @property
    def given_precision(self) -> float | None:
        """The prior precision given as a number."""
        return self.prior_precision


@dataclass(frozen=True)
class SearchedPriorOptions(LayersOptions):
    """A prior precision that is searched for, taken from the base, or given."""

    prior_precision: str = option(
        AUTO,
        "Prior precision of the target, biases included: a number, inherit (the base's), or auto (searched for "
        "on val). For other layers or without a labelled val split, auto means inherit.",
        metavar="NUMBER|inherit|auto",
        group="Target",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior_precision not in (AUTO, INHERIT):
            parse_positive(self.prior_precision, "\0prior_precision\0", "auto, inherit or a positive number")

    @property
    def given_precision(self) -> float | None:
        """The prior precision given as a number."""
        return None if self.prior_precision in (AUTO, INHERIT) else float(self.prior_precision)

    def params(self) -> dict[str, Any]:
        """Return the options that change numbers; an inherited prior is recorded as None."""
        own = AUTO if self.prior_precision == AUTO else self.given_precision
        return {**super().params(), "prior_precision": own}


NO_NETWORK = "flatten"
IDENTITY = "identity"  # name of a last layer that is the identity on the network's logits


def model_arg() -> Any:
    """Declare the option for network arguments."""
    return option(
        [],
        "Argument of the network, or how it reads texts: answers=A,B,C for a language model, pairs=yes for a reward model.",
        metavar="KEY=VALUE",
        group="Network",
    )


def data() -> Any:
    """Declare the option for splits."""
    return option([], _data_help, metavar="SPLIT=SPEC", group="Data")


def _data_help() -> str:
    return f"A split and where to read it: {', '.join(list_forms())}; @N takes the first N examples."


def hold_out() -> Any:
    """Declare the option that moves examples from one split to another."""
    return option(
        [],
        "Move N random examples from one split to another (of rows with groups, whole groups), such as val=test:2000. "
        "Validation examples must not be training examples.",
        metavar="NEW=OLD:N",
        group="Data",
    )


def task() -> Any:
    """Declare the option for the type of the labels."""
    return option(
        None,
        "Type of the labels; multilabel is an (N, L) array of zeros and ones. Default: inferred.",
        choices=TASKS,
        group="Data",
        is_rare=True,
    )


def mean() -> Any:
    """Declare the option for the channel means."""
    return option(None, "Mean of each channel, to normalise inputs in [0, 1].", metavar="M[,M,M]", group="Images")


def std() -> Any:
    """Declare the option for the channel standard deviations."""
    return option(None, "Standard deviation of each channel.", metavar="S[,S,S]", group="Images")


def resize() -> Any:
    """Declare the option for the size images are resized to before cropping, in pixels."""
    return option(None, "Resize the shorter side of images to this many pixels.", minimum=1, group="Images")


def crop() -> Any:
    """Declare the option for the size of the centre crop, in pixels."""
    return option(None, "Crop the centre square of this many pixels.", minimum=1, group="Images")


def no_exif() -> Any:
    """Declare the option to ignore EXIF orientation."""
    return option(
        False,
        "Ignore the EXIF orientation of images. Use this option if training ignored it too.",
        group="Images",
        is_rare=True,
    )


def background() -> Any:
    """Declare the option for the colour behind transparent pixels."""
    return option(
        None,
        "Colour behind transparent pixels. Default: white.",
        choices=("white", "black"),
        group="Images",
        is_rare=True,
    )


def skip_unreadable(group: str = "Data", *, is_rare: bool = False) -> Any:
    """Declare the option to leave out examples that cannot be read."""
    return option(
        False,
        "Leave out examples that cannot be read, such as damaged images, and list them with the reasons in a file. Reads the data twice.",
        group=group,
        numeric=False,
        is_rare=is_rare,
    )


def max_skipped(group: str = "Data") -> Any:
    """Declare the option for the largest share of a split that may be unreadable."""
    return option(
        None,
        "Fail if \0skip_unreadable\0 would leave out more than this share of a split. Default: 0.01.",
        minimum=0,
        maximum=1,
        group=group,
        numeric=False,
        is_rare=True,
    )


def check_skipped(skip_unreadable: bool, max_skipped: float | None) -> None:
    """Raise UsageError for a largest share of unreadable examples where none may be left out."""
    if max_skipped is not None and not skip_unreadable:
        raise UsageError("\0max_skipped\0 limits \0skip_unreadable\0: add \0skip_unreadable\0")


def num_workers() -> Any:
    """Declare the option for the number of reader processes."""
    return option(
        0,
        "Number of processes that read data, decode images and tokenise text.",
        minimum=0,
        maximum=256,
        numeric=False,
        group="Computation",
        is_rare=True,
    )


GRAMMAR = "rhat<=NUMBER, ess>=NUMBER, ess-tail>=NUMBER, joined by commas, each at most once"
_DIRECTIONS = {"rhat": "<=", "ess": ">=", "ess-tail": ">="}


class Condition(NamedTuple):
    """An upper bound on rhat, or a lower bound on ess or ess-tail."""

    name: str
    bound: float

    def is_met(self, value: float | None) -> bool:
        """Return whether the value is present and within the bound."""
        if value is None:
            return False
        return value <= self.bound if _DIRECTIONS[self.name] == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.name}{_DIRECTIONS[self.name]}{self.bound:g}"


def parse_until(text: str, flag: str) -> tuple[Condition, ...]:
    """Parse stopping conditions. Raises UsageError with the grammar."""
    found: dict[str, Condition] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z-]+)\s*([<>]=)\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*", part)
        name, direction, number = match.groups() if match else ("", "", "0")
        if _DIRECTIONS.get(name) != direction or name in found:
            raise UsageError(f"{flag}: expected {GRAMMAR}; got {text!r}")
        smallest = 1.0 if name == "rhat" else 0.0
        if not smallest < float(number) < float("inf"):
            raise UsageError(f"{flag}: the bound of {name} must be above {smallest:g}; got {number}")
        found[name] = Condition(name, float(number))
    return tuple(found.values())


def find_unmet_conditions(conditions: Sequence[Condition], values: Mapping[str, float | None]) -> list[Condition]:
    """Return the conditions that the values do not meet; a value of None meets none."""
    return [condition for condition in conditions if not condition.is_met(values[condition.name])]


def parse_corruption(text: str, option: str = "\0corrupt\0") -> tuple[str, int]:
    """Parse `KIND:SEVERITY`. Raises UsageError with the valid kinds."""
    kind, _, severity = text.partition(":")
    if kind not in CORRUPTIONS or severity not in {str(one + 1) for one in range(NUM_SEVERITIES)}:
        raise UsageError(
            f"{option}: expected KIND:SEVERITY, such as gaussian-noise:3, with KIND one of "
            f"{', '.join(CORRUPTIONS)} and SEVERITY 1 to {NUM_SEVERITIES}; got {text!r}"
        )
    return kind, int(severity)


def check_corruption(text: str | None, option: str = "\0corrupt\0") -> None:
    """Raise UsageError unless `text` is None or a valid corruption."""
    if text is not None:
        parse_corruption(text, option)


def check_variant(value: str | Sequence[str] | None, flag: str) -> None:
    """Raise UsageError for a name that is no integrator, with or without settings after a dash."""
    families = registry.names("integrators")
    for name in [value] if isinstance(value, str) else value or ():
        if not any(name == family or name.startswith(f"{family}-") for family in families):
            raise unknown_value_error(flag, name, families, also=["or one with its settings"])


EITHER = "give either \0model\0 MODEL with \0data\0 SPLIT=SPEC, or \0from_npz\0 FILE"


def list_maps() -> tuple[str, ...]:
    """Return the names of the calibration maps."""
    from bnncli.evaluation.calibration_maps import MAPS

    return tuple(MAPS)
