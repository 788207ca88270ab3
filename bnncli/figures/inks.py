"""The colours of figures, each with the one that takes its place on a dark page."""

from __future__ import annotations

INK, PAPER, GREY, PALE = "#000000", "#ffffff", "#5b5b5b", "#dddddd"
BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"

# Of equal standing: as far from dark paper as the first is from white. Ink and paper are the page's own.
DARK = {
    GREY: "#a9b0b8",
    PALE: "#3a4149",
    BLUE: "#5cb3f0",
    VERMILION: "#ff9150",
    GREEN: "#35c99b",
    "#cc79a7": "#e6a1c8",
    "#e69f00": "#f2b63c",
    "#56b4e9": "#9ad6fb",
    "#7fa8cf": "#3f6c99",
    "#c44601": "#ff9150",
    "#b34700": "#ff9150",
    "#1f4e79": "#8cbdf0",
}


def variable(ink: str) -> str:
    """The CSS of a colour that a page may turn: ink and paper as the page has them."""
    named = {INK: "currentColor", PAPER: "var(--paper)"}
    return named.get(ink) or f"var(--ink-{ink[1:]})"


def declarations(*, is_dark: bool) -> str:
    """The CSS that declares them for one of the two."""
    return " ".join(f"--ink-{light[1:]}: {dark if is_dark else light};" for light, dark in DARK.items())
