"""What the steps of a recipe say: progress is shown, warnings are kept for its results, and the rest is for -v."""

from __future__ import annotations

from dataclasses import dataclass, field

from bnncli.options.command import CommonOptions
from bnncli.options.declaration import spelled
from bnncli.progress import Task
from bnncli.session.run import Voice


@dataclass
class Aside:
    """A voice within another's.

    Args:
        voice: the command's.
        warnings: of the step, each text once.

    Attributes:
        options: those of the command.
    """

    voice: Voice
    warnings: list[str] = field(default_factory=list)
    options: CommonOptions = field(init=False)

    def __post_init__(self) -> None:
        self.options = self.voice.options

    def debug(self, text: str) -> None:
        """As the command's."""
        self.voice.debug(text)

    def info(self, text: str) -> None:
        """A line for whoever wants to know more."""
        self.voice.debug(str(spelled(text)))

    def warn(self, text: str) -> None:
        """Kept, for the results."""
        text = str(spelled(text))
        if text not in self.warnings:
            self.warnings.append(text)

    def poll(self, where: str = "") -> None:
        """Raise Interrupted when a signal has come."""
        self.voice.poll(where)

    def task(self, name: str, total: int) -> Task:
        """A task of the command's."""
        return self.voice.task(name, total)
