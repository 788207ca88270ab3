"""What helps a command that ran out of memory: options of its own, or none."""

from __future__ import annotations

from bnncli.cli.option_values import option_fields
from bnncli.options.command import Command
from bnncli.options.declaration import flag_of

# Options that decide how much is held at once, the one that helps most first.
_WAYS = {
    "structure": "a smaller {}",
    "chains": "fewer {}",
    "repeats": "fewer {}",
    "batch_size": "a smaller {}",
    "samples": "fewer {}",
    "grid_size": "a smaller {}",
    "posterior": "fewer {} at a time",
}
_MOST_NAMED = 2


def memory_advice(command: Command | None, *, is_gpu: bool) -> str:
    """What to do when a command needs more memory than there is.

    Args:
        command: the one that ran; None before it is known.
        is_gpu: whether it is a GPU's memory that is too small.
    """
    options = option_fields(command) if command is not None else {}
    ways = [text.format(flag_of(name)) for name, text in _WAYS.items() if name in options][:_MOST_NAMED]
    if is_gpu and "device" in options:
        ways.append("--device cpu")
    return "use " + " or ".join(ways) if ways else "free memory, or use a machine with more"
