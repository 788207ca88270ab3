"""The style of pages, light and dark, on a phone, on a desk, on paper: page.css, and the colours that it speaks of."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from bnncli.figures.inks import declarations

_LIGHT = (
    "--paper: #ffffff; --ink: #16191d; --soft: #50565d; --line: #d5d9de; --wash: #f4f6f8; --accent: #00558a; --shade: #0000002e; "
    f"--warn: #8a4b00; {declarations(is_dark=False)}"
)
_DARK = (
    "--paper: #14171a; --ink: #e8eaed; --soft: #b3bac2; --line: #3a4149; --wash: #1e2328; --accent: #7cc4f8; --shade: #000000b0; "
    f"--warn: #f0b267; {declarations(is_dark=True)}"
)


@cache
def style() -> str:
    """The whole of it. On paper pages are light."""
    colors = f":root {{ color-scheme: light dark; {_LIGHT} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    return colors + files("bnncli.pages").joinpath("page.css").read_text(encoding="utf-8")
