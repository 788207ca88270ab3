"""What the project promises of itself: its warnings, and README's commands that CI runs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bnncli import __version__

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[1]
WARNS = """
import warnings

def test_{number}():
    warnings.warn_explicit("text {number}", {category}, "file", 1, module="{module}")
"""
CASES = [
    ("bnncli.latent.fit", "RuntimeWarning", True),
    ("bnncli", "ResourceWarning", True),
    ("bnncli.latent.fit", "FutureWarning", False),
    ("bnncli.latent.fit", "UserWarning", False),
    ("torch._dynamo.guards", "RuntimeWarning", False),
    ("bnnclient", "RuntimeWarning", False),
    ("test_x", "DeprecationWarning", False),
]


def test_only_faults_in_our_own_code_make_a_warning_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    test = tmp_path / "test_x.py"
    cases = list(enumerate(CASES))
    test.write_text("".join(WARNS.format(number=n, module=one[0], category=one[1]) for n, one in cases))
    words = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, test, "-rA"]
    done = subprocess.run([*words, "-p", "no:cacheprovider"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    lines = done.stdout.splitlines()
    for number, (_, category, is_error) in cases:
        passed = f"PASSED test_x.py::test_{number}" in lines
        warned = f"  file:1: {category}: text {number}" in lines
        assert (passed, warned) == (not is_error, not is_error), done.stdout
    assert "2 failed, 5 passed, 5 warnings" in lines[-1]


def test_an_older_python_is_told_what_is_needed() -> None:
    words = [sys.executable, "-c", "import sys; sys.version_info = (3, 10, 13); import bnncli"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "ImportError: bnncli needs Python 3.11 or newer; this is Python 3.10"


def test_the_citation_names_the_version() -> None:
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_a_docker_build_gets_every_file_that_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *wheel["packages"]}
    needed |= {name.partition("/")[0] for name in wheel["force-include"]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert needed == {line.removeprefix("!") for line in lines if line.startswith("!")}
