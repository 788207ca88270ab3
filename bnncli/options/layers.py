"""Options that say which parameters of the network a posterior is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, option
from bnncli.parameters.module import LAST, STATE


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
