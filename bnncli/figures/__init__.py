"""Figures: one file each, a function that takes numbers and returns a matplotlib Figure; Agg and file backends only.

Nothing here touches pyplot or its global state, and matplotlib is imported when a figure is asked for, not before.
"""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "bnncli-figure"  # in the metadata of every figure: what carries it may be drawn again
_DOTS_PER_INCH = 160
_TITLE = "Title"
_NO_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # a file of that name may have been put into the run folder
_DESCRIPTIONS = {"png": "Description", "svg": "Description", "pdf": "Subject"}  # what each form calls it
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": MARK},
    "svg": {"Creator": MARK, "Date": None},  # without dates the same numbers give the same bytes
    "pdf": {"Creator": MARK, "CreationDate": None},
}


def render(figure: Figure, form: str, *, title: str | None = None, description: str | None = None) -> bytes:
    """The file of a figure as png, svg or pdf, with our mark and without a date.

    Args:
        title, description: of the figure, where they are to stand in the file.
    """
    said = {_TITLE: title, _DESCRIPTIONS[form]: description}
    metadata = {**_METADATA[form], **{name: text for name, text in said.items() if text is not None}}
    return _saved(figure, form, metadata, has_letters=False)


def svg_with_letters(figure: Figure) -> bytes:
    """The figure as SVG whose letters are letters, for a page that has fonts; not their outlines, as files have them."""
    return _saved(figure, "svg", _METADATA["svg"], has_letters=True)


def _saved(figure: Figure, form: str, metadata: dict[str, str | None], *, has_letters: bool) -> bytes:
    import matplotlib

    content = io.BytesIO()
    with (
        matplotlib.rc_context({"svg.hashsalt": MARK, "svg.fonttype": "none" if has_letters else "path"}),
        warnings.catch_warnings(),
    ):
        # Letters of a user's names that the font lacks are boxes in the figure, where they are seen.
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from font", UserWarning)
        # tight: an axes of fixed aspect beside a wide legend may be laid out past the edge
        figure.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=metadata, bbox_inches="tight")
    found = content.getvalue()
    return _NO_XML.sub(lambda byte: rb"\x%02x" % byte[0][0], found) if form == "svg" else found
