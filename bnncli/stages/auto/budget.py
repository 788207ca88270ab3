"""A limit of time on fits: loops that report progress end when it is spent."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

from bnncli.errors import Interrupted
from bnncli.progress import Task


class BudgetSpent(Interrupted):
    """The time given to all fits is over: raised where long loops report progress, as a signal is."""

    default_code = "budget_spent"

    def __init__(self) -> None:
        super().__init__(signal.SIGALRM, "the budget is spent")


@dataclass
class LimitedVoice:
    """A console whose loops end at a deadline; all else is the console's.

    Args:
        console: that speaks.
        deadline: of time.monotonic(); None for no limit.
    """

    console: Any
    deadline: float | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)

    def task(self, name: str, total: int) -> Task:
        """A task of the console's that ends at the deadline."""
        return _LimitedTask(self.console.task(name, total), self)

    def poll(self, where: str = "") -> None:
        """Raise Interrupted after a signal, BudgetSpent at the deadline."""
        self.console.poll(where)
        self.check()

    def check(self) -> None:
        """Raise BudgetSpent at the deadline."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise BudgetSpent


@dataclass
class _LimitedTask:
    task: Task
    voice: LimitedVoice

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.task.advance(amount, note)
        self.voice.check()
