"""Options of several commands: which layers, which target and prior, what goes into a network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.likelihoods import TASKS
from bnncli.names import not_one_of
from bnncli.numerics.corruptions import CORRUPTIONS, NUM_SEVERITIES
from bnncli.options.declaration import Checked, forms, option, parse_positive
from bnncli.parameters.module import LAST, STATE

if TYPE_CHECKING:
    pass


def trust_code_option(*, is_recorded: bool = True, also: str = "", group: str = "Inputs", is_rare: bool = True) -> Any:
    """The option --trust-code, of a group that artifacts record or of another.

    Args:
        also: another case in which that code runs.
    """
    text = (
        "Execute the code that the run folder names (network factory, jit, py: data), needed for layers other "
        f"than the last{also}. Without this option, no such code runs."
    )
    return option(False, text, numeric=not is_recorded, group=group, is_rare=is_rare)


def check_layers(layers: str | None, where: str = "\0layers\0", *, is_read: bool = True) -> None:
    """Raise UsageError unless it is last, all or patterns, or was not given.

    Args:
        is_read: whether it chooses among posteriors that are there.
    """
    if layers == STATE and not is_read:
        raise UsageError(f"{where}: {STATE} is only for fit-ensemble; buffers have no other posterior")
    if layers is not None and not all(layers.split("+")):
        raise UsageError(f"{where}: expected last, all or patterns joined by +; got {layers!r}")


def chosen_layers_option(group: str = "", *, is_recorded: bool = True, is_rare: bool = False) -> Any:
    """The option --layers of commands that read posteriors: which of them. Of a group that artifacts record or of another."""
    return option(
        None,
        "Use only posteriors over these parameters, written as in the command that fitted them.",
        metavar="last|all|PATTERN",
        check=check_layers,
        numeric=not is_recorded,
        group=group,
        is_rare=is_rare,
    )


@dataclass(frozen=True)
class LayersOptions(Checked):
    """Of the commands that make posteriors.

    Attributes:
        may_follow_base: whether a base says the layers where they are left out, so that \0trust_code\0 may stand alone.
    """

    may_follow_base: ClassVar[bool] = False
    layers: str = option(
        LAST,
        "Parameters of the posterior: last (linear layer), all, or patterns joined by +, such as `layer4*+fc*`. "
        "Other layers need the network and its inputs.",
        metavar="last|all|PATTERN",
        numeric=False,  # recorded where it is given: `layers_params`
        group="Target",
    )
    trust_code: bool = trust_code_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.layers, is_read=False)
        if not self.may_follow_base:
            self.check_trust()

    def check_trust(self) -> None:
        """Pass where trust is needed, or not given. Raises UsageError otherwise."""
        if self.trust_code and self.is_last_layer:
            raise UsageError("\0trust_code\0 is for \0layers\0 all or a pattern; the last layer needs no code")

    @property
    def is_last_layer(self) -> bool:
        """Whether nothing but the features is needed."""
        return self.layers == LAST

    @property
    def layers_params(self) -> dict[str, Any]:
        """What requests record of it: nothing for the last layer."""
        return {} if self.is_last_layer else {"layers": self.layers}

    @property
    def layers_suffix(self) -> str:
        """What the default name of such a posterior ends with."""
        if self.is_last_layer:
            return ""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.layers).strip("-").lower()
        return "-" + ("-".join(filter(None, words.split("-"))) or "some")


AUTO, INHERIT = "auto", "inherit"


@dataclass(frozen=True)
class TargetOptions(LayersOptions):
    """The layers of a target, and the base whose prior it has."""

    base: str | None = option(
        None,
        "Artifact whose prior defines the target. Default: laplace, or laplace-all for \0layers\0 all.",
        metavar="NAME|FILE",
        numeric=False,
        group="Target",
    )

    @property
    def default_base(self) -> str:
        """The base where none was named."""
        return f"laplace{self.layers_suffix}"

    @property
    def given_precision(self) -> float | None:
        """The prior precision that was given as a number."""
        return None

    def params(self) -> dict[str, Any]:
        """The options that change numbers."""
        return {**super().params(), **self.layers_params}


@dataclass(frozen=True)
class GivenPriorOptions(TargetOptions):
    """The same, and a prior precision in place of the base's."""

    prior_precision: float | None = option(
        None,
        "Prior precision of the target, biases included. Default: the base's prior.",
        minimum=1e-30,
        group="Target",
    )

    @property
    def given_precision(self) -> float | None:
        """The prior precision that was given as a number."""
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
        """The prior precision that was given as a number."""
        return None if self.prior_precision in (AUTO, INHERIT) else float(self.prior_precision)

    def params(self) -> dict[str, Any]:
        """The options that change numbers; a prior that is the base's is recorded as none of its own."""
        own = AUTO if self.prior_precision == AUTO else self.given_precision
        return {**super().params(), "prior_precision": own}


NO_NETWORK = "flatten"
IDENTITY = "identity"  # as the name of a last layer: an identity layer on the network's own logits


def model_arg() -> Any:
    """Arguments of the network."""
    return option([], "Argument of the network.", metavar="KEY=VALUE", group="Network")


def data() -> Any:
    """Splits."""
    return option([], _data_help, metavar="SPLIT=SPEC", group="Data")


def _data_help() -> str:
    return f"A split and where to read it: {', '.join(forms())}; @N takes the first N examples."


def hold_out() -> Any:
    """What moves rows from one split into another."""
    return option(
        [],
        "Move N random examples from one split to another, such as val=test:2000. Validation examples must not "
        "be training examples.",
        metavar="NEW=OLD:N",
        group="Data",
    )


def task() -> Any:
    """What labels are."""
    return option(
        None,
        "Type of the labels; multilabel is an (N, L) array of zeros and ones. Default: inferred.",
        choices=TASKS,
        group="Data",
        is_rare=True,
    )


def mean() -> Any:
    """Of the channels."""
    return option(None, "Mean of each channel, to normalise inputs in [0, 1].", metavar="M[,M,M]", group="Images")


def std() -> Any:
    """Of the channels."""
    return option(None, "Standard deviation of each channel.", metavar="S[,S,S]", group="Images")


def resize() -> Any:
    """Of images, before they are cropped."""
    return option(None, "Resize the shorter side of images to this many pixels.", minimum=1, group="Images")


def crop() -> Any:
    """Of images."""
    return option(None, "Crop the centre square of this many pixels.", minimum=1, group="Images")


def no_exif() -> Any:
    """Of images."""
    return option(
        False,
        "Ignore the EXIF orientation of images. Use this option if training ignored it too.",
        group="Images",
        is_rare=True,
    )


def background() -> Any:
    """Of images."""
    return option(
        None,
        "Colour behind transparent pixels. Default: white.",
        choices=("white", "black"),
        group="Images",
        is_rare=True,
    )


def num_workers() -> Any:
    """That read."""
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
    """A bound on one quantity: rhat from above, ess and ess-tail from below."""

    name: str
    bound: float

    def is_met(self, value: float | None) -> bool:
        """True when the value is there and within the bound."""
        if value is None:
            return False
        return value <= self.bound if _DIRECTIONS[self.name] == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.name}{_DIRECTIONS[self.name]}{self.bound:g}"


def parse_until(text: str, flag: str) -> tuple[Condition, ...]:
    """The conditions that `text` says. Raises UsageError, with the grammar, when it says none."""
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


def unmet(conditions: Sequence[Condition], values: Mapping[str, float | None]) -> list[Condition]:
    """The conditions that the values, by name, do not meet; a value that is None meets none."""
    return [condition for condition in conditions if not condition.is_met(values[condition.name])]


def parse_corruption(text: str, option: str = "\0corrupt\0") -> tuple[str, int]:
    """Kind and severity of `KIND:SEVERITY`. Raises UsageError for another form, with the kinds."""
    kind, _, severity = text.partition(":")
    if kind not in CORRUPTIONS or severity not in {str(one + 1) for one in range(NUM_SEVERITIES)}:
        raise UsageError(
            f"{option}: expected KIND:SEVERITY, such as gaussian-noise:3, with KIND one of "
            f"{', '.join(CORRUPTIONS)} and SEVERITY 1 to {NUM_SEVERITIES}; got {text!r}"
        )
    return kind, int(severity)


def check_corruption(text: str | None, option: str = "\0corrupt\0") -> None:
    """Nothing, when there is none or it is one. Raises UsageError otherwise."""
    if text is not None:
        parse_corruption(text, option)


def check_variant(value: str | Sequence[str] | None, flag: str) -> None:
    """Raise UsageError where a name, or one of several, is no integrator's, alone or before a dash and settings."""
    families = registry.names("integrators")
    for name in [value] if isinstance(value, str) else value or ():
        if not any(name == family or name.startswith(f"{family}-") for family in families):
            raise not_one_of(flag, name, families, also=["or one with its settings"])


EITHER = "give either \0model\0 MODEL with \0data\0 SPLIT=SPEC, or \0from_npz\0 FILE"
