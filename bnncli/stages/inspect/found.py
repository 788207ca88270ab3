"""What inspect has found out about a file or a folder, and the command that would work with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncli.names import quoted
from bnncli.options.command import pasted
from bnncli.options.shared import IDENTITY
from bnncli.session.run import Result, Table

MAX_ROWS = 400
_NETWORK = "NET.py:FACTORY"  # stands for what only the user knows, as TRAIN and CKPT do
CHECKPOINT = "CKPT"
MODEL = "MODEL"
_NOT_LINEAR = ("torchvision:squeezenet", "timm:volo")  # in what they do after their last weights


@dataclass
class Found:
    """What a place is.

    Attributes:
        kind: in one or two words, stable for scripts.
        facts: lines of the table: what, value.
        document: further keys of the JSON document.
        model: what --model would name; None where only the user knows, or where nothing runs it.
        suggested: the command that would work, filled in as far as can be known.
    """

    kind: str
    facts: list[list[str]] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    suggested: str | None = None

    def add(self, what: str, value: object, *, key: str | None = None) -> None:
        """A line of the table, and of the document under `key`."""
        self.facts.append([what, short(value)])
        if key is not None:
            self.document[key] = value

    def suggest(
        self, path: Path, *, model: str | None, data: str, architecture: str | None = None, **options: Any
    ) -> None:
        """Suggest the extract-features line for a checkpoint, or for a model that has weights of its own.

        Args:
            model: None where only the user knows.
            data: the kind and place of a split.
            architecture: as --model would name it, where `model` does not.
        """
        self.model = model
        if (architecture or model or "").startswith(_NOT_LINEAR):
            options["last_layer"] = IDENTITY
        split = [f"train={data}"]
        self.suggested = pasted("extract-features", str(path), model=model or _NETWORK, data=split, **options)

    def result(self, path: Path) -> Result:
        """As the command line prints it, the suggested line last."""
        document = {"kind": self.kind, **self.document, "suggested": self.suggested}
        rows = [["kind", self.kind], *self.facts][:MAX_ROWS]
        lines = [] if self.suggested is None else [self.suggested]
        summary = (
            ["add --data test=SPEC --hold-out val=test:N: auto and most fits need a validation split"]
            if " extract-features " in "".join(lines) and " --data " in lines[0]
            else []
        )
        return Result(
            summary=summary, extra=document, tables=[Table(["what", "value"], rows, title=str(path))], lines=lines
        )


def short(value: Any, limit: int = 160) -> str:
    """A value of a file in a cell: in one line, cut after `limit` characters."""
    text = quoted(value, limit=limit)[1:-1] if isinstance(value, str) else str(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def data_line(spec: str) -> str:
    """The extract-features line for data."""
    return pasted("extract-features", CHECKPOINT, model=MODEL, data=[f"train={spec}"])
