"""Figures: one file each, a function that takes numbers and returns a matplotlib Figure; Agg and file backends only.

Nothing here touches pyplot or its global state, and matplotlib is imported when a figure is asked for, not before.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "bnncli-figure"  # in the metadata of every figure: what carries it may be drawn again
_DOTS_PER_INCH = 160
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": MARK},
    "svg": {"Creator": MARK, "Date": None},  # without dates the same numbers give the same bytes
    "pdf": {"Creator": MARK, "CreationDate": None},
}


def render(figure: Figure, form: str) -> bytes:
    """The file of a figure as png, svg or pdf, with our mark and without a date."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": MARK}), warnings.catch_warnings():
        # Letters of a user's names that the font lacks are boxes in the figure, where they are seen.
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from font", UserWarning)
        # tight: an axes of fixed aspect beside a wide legend may be laid out past the edge
        figure.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=_METADATA[form], bbox_inches="tight")
    return content.getvalue()
