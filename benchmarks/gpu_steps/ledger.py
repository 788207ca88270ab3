"""What was measured, within which bounds it was to lie, and what is missed: printed and written as it comes."""

from __future__ import annotations

import json
import math
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Ledger:
    """The rows of one step, and the time that it may take.

    Args:
        seconds: after which no further item is begun: what is left counts as missed.
        only: a regular expression: items whose names do not match are passed over.
        step: its name, which each row in the file carries.
        path: a file of JSON lines to which each row is appended.
    """

    def __init__(self, seconds: float = math.inf, only: str = "", *, step: str = "", path: Path | None = None) -> None:
        self.rows: list[Row] = []
        self.only, self.step, self.path = only, step, path
        self.started = time.monotonic()
        self.end = self.started + seconds

    @property
    def missed(self) -> list[str]:
        """What does not hold, in words."""
        return [row["what"] for row in self.rows if row["is_met"] is False]

    def item(self, name: str, work: Callable[..., None], *words: Any) -> None:
        """One piece of work, whose checks and notes come here; an error in it is a miss, and the next item is begun."""
        if re.search(self.only, name) is None:
            return
        if time.monotonic() > self.end:
            self.miss(name, "not begun: the step's time is over")
            return
        self.attempt(name, work, *words)

    def attempt(self, name: str, work: Callable[..., None], *words: Any) -> None:
        """The same whatever it is called and however late it is."""
        try:
            work(*words)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            self.miss(name, f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})")

    def check(self, what: str, value: float, most: float, *, least: float = -math.inf, **facts: Any) -> bool:
        """A number that is to lie in [least, most]; one that is none is missed. Facts go into the report as they are."""
        is_met = least <= value <= most
        bounds = f"at most {most:g}" if least == -math.inf else f"in [{least:g}, {most:g}]"
        known = ", ".join(f"{name} {_text(fact)}" for name, fact in facts.items())
        self._add(what, is_met, f"{value:.4g} ({bounds}{'; ' if known else ''}{known})", value=value, most=most,
                  least=least, facts=facts)  # fmt: skip
        return is_met

    def agree(self, what: str, is_met: bool, otherwise: str = "") -> bool:
        """Something that is to be so; `otherwise` says what came instead."""
        self._add(what, bool(is_met), "" if is_met else otherwise)
        return bool(is_met)

    def miss(self, what: str, why: str) -> None:
        """What could not be had at all."""
        self._add(what, False, why)

    def note(self, what: str, text: str = "", **facts: Any) -> None:
        """What is told and not judged, such as what is left out, and why."""
        self._add(what, None, text, facts=facts)

    def _add(self, what: str, is_met: bool | None, text: str, **numbers: Any) -> None:
        mark = {True: "held", False: "MISSED", None: "-"}[is_met]
        print(f"{mark:<7} {what}{': ' if text else ''}{text}", flush=True)
        row = {"what": what, "is_met": is_met, "text": text, **_finite(numbers)}
        self.rows.append(row)
        self.record(row)

    def record(self, row: Row) -> None:
        """Append a line to the file; several steps may do so at once."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, **row}, allow_nan=False) + "\n")


def _text(fact: Any) -> str:
    return f"{fact:.3g}" if isinstance(fact, float) else str(fact)


def _finite(numbers: Row) -> Row:
    """The same for JSON, which has no infinity: unbounded is null, and what is no number is a word."""
    found: Row = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            found[name] = _finite(value)
        elif isinstance(value, float) and not math.isfinite(value):
            found[name] = None if name in ("most", "least") else str(value)
        else:
            found[name] = value
    return found
