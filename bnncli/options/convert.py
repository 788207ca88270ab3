"""Options of convert."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class ConvertOptions(Checked):
    """Options of convert."""

    trust_pickle: bool = option(
        False, "Unpickle SOURCE, which can run any code in it. Use it only with files that you trust."
    )
    state: str | None = option(
        None,
        "Which weights to take from a checkpoint with several sets: a key that inspect lists, or ema for the "
        "averaged ones.",
        metavar="NAME",
    )
