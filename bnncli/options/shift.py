"""What --corrupt takes: KIND:SEVERITY."""

from __future__ import annotations

from bnncli.errors import UsageError
from bnncli.numerics.corruptions import CORRUPTIONS, NUM_SEVERITIES


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
