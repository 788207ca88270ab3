"""Makes README's pictures anew, from the demo: the table that it ends with, and its verdict and a few figures of its report.

python docs/images/make_pictures.py [--demo FOLDER]      # needs Chromium; a FOLDER of an earlier demo is used as it is
"""

from __future__ import annotations

import argparse
import html
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
WIDTH = 1100
MOST_BYTES = 150_000
_COLORS = 64  # enough for text and lines, at a third of the size
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1.4",
)  # fmt: skip
_PART = "<style>nav, section:not(#verdict):not(#confidence), section > .note, figcaption, details { display: none; } h2 { margin-top: 1.5rem; }</style></head>"
_TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ margin: 0; background: #16191d; }} pre {{ margin: 0; padding: 18px 20px; color: #e8eaed; font: 11.3px/1.55 "DejaVu Sans Mono", monospace; }}
</style><pre>{text}</pre>"""


def demo(folder: Path) -> str:
    """What the demo prints as its result."""
    words = [sys.executable, "-m", "bnncli", "demo", "--dir", folder.name, "-q"]
    return subprocess.run(words, cwd=folder.parent, check=True, capture_output=True, text=True).stdout


def picture(page: Path, target: Path, *, height: int) -> None:
    """The beginning of a page as a small PNG."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("pictures are made by Chromium, which is not there")
    with tempfile.TemporaryDirectory() as profile:
        words = [
            browser,
            *_QUIET,
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{height}",
            f"--screenshot={target}",
        ]
        subprocess.run([*words, page.as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(target) as image:
        small = image.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
    small.save(target, optimize=True)
    if target.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{target} has {target.stat().st_size} bytes; at most {MOST_BYTES} are allowed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make README's pictures.")
    parser.add_argument("--demo", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = (asked.demo or Path(made) / "bnncli-demo").resolve()
        lines = demo(folder).splitlines()
        test = [line.rstrip() for line in lines if not line.startswith(("val ", "seconds"))]
        terminal = Path(made) / "table.html"
        text = "\n".join(["$ bnncli demo", *test[:7]])
        terminal.write_text(_TERMINAL.format(text=html.escape(text)), encoding="utf-8")
        picture(terminal, HERE / "demo.png", height=182)
        report = Path(made) / "report.html"
        whole = (folder / "lenet5-fmnist.pt.bnn" / "report.html").read_text(encoding="utf-8")
        report.write_text(whole.replace("</head>", _PART), encoding="utf-8")
        picture(report, HERE / "report.png", height=1080)


if __name__ == "__main__":
    main()
