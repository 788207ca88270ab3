"""What an accessibility checker (axe-core) finds in pages of ours, in headless Chromium: two widths, light and dark, everything unfolded.

    apt-get install chromium; npm install --prefix DIR axe-core
    python benchmarks/report_accessibility.py ckpt.pt.bnn/report.html --axe DIR/node_modules/axe-core/axe.min.js

A copy of the page is looked at, with the checker in it and without its policy, which would not let the checker run. Exits 1 where a
finding is serious or critical, 0 where there is none, and 0 with a word where there is no browser or no checker.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

WIDTHS = (390, 1280)
SCHEMES = {"light": "1", "dark": "0"}
GRAVE = ("serious", "critical")
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
_CHECK = """
document.querySelectorAll("details").forEach((one) => { one.open = true; });
axe.run(document, {resultTypes: ["violations"]}).then((found) => {
  const told = document.createElement("pre");
  told.id = "axe-found";
  told.textContent = JSON.stringify({
    wide: document.documentElement.scrollWidth > window.innerWidth,
    violations: found.violations.map((one) => [one.id, one.impact, one.nodes.length, one.nodes[0].html.slice(0, 160)])});
  document.body.append(told);
});
"""


class Finding(NamedTuple):
    """A rule that the page breaks: its name, how grave that is, how often, and the first place."""

    rule: str
    impact: str
    count: int
    first: str


def browser() -> str | None:
    """Chromium, where there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def findings(page: Path, axe: Path, *, width: int, scheme: str) -> tuple[list[Finding], bool]:
    """What the checker finds, and whether the page is wider than the window. Raises RuntimeError where it does not come to an end."""
    text = page.read_text(encoding="utf-8")
    checked = _POLICY.sub("", text).replace(
        "</body>", f"<script>{axe.read_text(encoding='utf-8')}</script><script>{_CHECK}</script></body>"
    )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(checked, encoding="utf-8")
        words = [
            str(browser()), *_QUIET, f"--user-data-dir={folder}/profile", f"--window-size={width},900",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--virtual-time-budget=60000", "--dump-dom", copy.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    told = re.search(r'<pre id="axe-found">(.*?)</pre>', done.stdout, re.DOTALL)
    if told is None:
        raise RuntimeError(f"the checker did not end: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return [Finding(*one) for one in found["violations"]], bool(found["wide"])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Check pages for accessibility.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--axe", type=Path, required=True)
    asked = parser.parse_args(words)
    if browser() is None or not asked.axe.is_file():
        print("nothing is checked: there is no Chromium, or no axe")
        return 0
    has_grave = False
    for page in asked.pages:
        for width in WIDTHS:
            for scheme in SCHEMES:
                found, is_wide = findings(page, asked.axe, width=width, scheme=scheme)
                grave = [one for one in found if one.impact in GRAVE]
                has_grave = has_grave or bool(grave) or is_wide
                print(
                    f"{page.name} {width} {scheme}: {len(found)} findings, {len(grave)} serious or critical{', wider than the window' if is_wide else ''}"
                )
                for one in found:
                    print(f"  {one.impact} {one.rule} x {one.count}: {one.first}")
    return int(has_grave)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
