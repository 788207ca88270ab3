"""Figures: one file each, a function that takes numbers and returns a matplotlib Figure; only Agg and file backends.

Never uses pyplot or its global state. Imports matplotlib only when a figure is drawn.
"""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "bnncli-figure"  # in the metadata of every figure, so that bnncli may overwrite it
_DOTS_PER_INCH = 160
_TITLE = "Title"
_NO_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # run folder names, and so labels, may contain these
_DESCRIPTIONS = {"png": "Description", "svg": "Description", "pdf": "Subject"}  # metadata key of each format
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": MARK},
    "svg": {"Creator": MARK, "Date": None},  # without dates, the same numbers give the same bytes
    "pdf": {"Creator": MARK, "CreationDate": None},
}


def render(figure: Figure, form: str, *, title: str | None = None, description: str | None = None) -> bytes:
    """Render a figure as png, svg or pdf, with bnncli's mark and without a date.

    Args:
        title, description: metadata of the file, if given.
    """
    said = {_TITLE: title, _DESCRIPTIONS[form]: description}
    metadata = {**_METADATA[form], **{name: text for name, text in said.items() if text is not None}}
    return _save_figure(figure, form, metadata, has_letters=False)


def svg_with_letters(figure: Figure) -> bytes:
    """Render a figure as SVG with text elements, for a page that has the fonts; files use outlines instead."""
    return _save_figure(figure, "svg", _METADATA["svg"], has_letters=True)


def _save_figure(figure: Figure, form: str, metadata: dict[str, str | None], *, has_letters: bool) -> bytes:
    import matplotlib

    content = io.BytesIO()
    with (
        matplotlib.rc_context({"svg.hashsalt": MARK, "svg.fonttype": "none" if has_letters else "path"}),
        warnings.catch_warnings(),
    ):
        # The font may lack letters of a user's names; the figure shows boxes.
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from font", UserWarning)
        # tight: fixed-aspect axes beside a wide legend may extend past the edge
        figure.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=metadata, bbox_inches="tight")
    found = content.getvalue()
    return _NO_XML.sub(lambda byte: rb"\x%02x" % byte[0][0], found) if form == "svg" else found
