"""An accessibility checker finds nothing grave in a report, where there are a browser and the checker (BNNCLI_AXE=axe.min.js)."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
from problems.command_line import Cli

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/report_accessibility.py"))
AXE = Path(os.environ.get("BNNCLI_AXE", "absent"))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(SCRIPT["browser"]() is None or not AXE.is_file(), reason="no Chromium, or no axe"),
]


def test_no_finding_is_grave_at_two_widths_light_and_dark(
    cli: Cli, small_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli("report", small_run).code == 0
    page = small_run.with_name("small.bnn") / "report.html"
    assert SCRIPT["main"]([str(page), "--axe", str(AXE)]) == 0
    assert capfd.readouterr().out.count("0 serious or critical") == 4


def test_what_is_grave_is_found(cli: Cli, small_run: Path) -> None:
    assert cli("report", small_run).code == 0
    page = small_run.with_name("small.bnn") / "report.html"
    page.write_text(page.read_text().replace("--soft: #50565d", "--soft: #c0c5cc").replace(' lang="en"', ""))
    found, _ = SCRIPT["findings"](page, AXE, width=1280, scheme="light")
    assert {"color-contrast", "html-has-lang"} <= {one.rule for one in found if one.impact in SCRIPT["GRAVE"]}
