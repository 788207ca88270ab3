"""What the project promises of itself: its warnings, and README's commands that CI runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WARNS = """
import sys, warnings

def test_it():
    warnings.warn_explicit("text", {category}, "file", 1, module="{module}")
"""


@pytest.mark.parametrize(
    ("module", "category", "is_error"),
    [
        ("bnncli.latent.fit", "RuntimeWarning", True),
        ("bnncli", "ResourceWarning", True),
        ("bnncli.latent.fit", "FutureWarning", False),
        ("bnncli.latent.fit", "UserWarning", False),
        ("torch._dynamo.guards", "RuntimeWarning", False),
        ("bnnclient", "RuntimeWarning", False),
        ("test_x", "DeprecationWarning", False),
    ],
)
def test_only_faults_in_our_own_code_make_a_warning_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, category: str, is_error: bool
) -> None:
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    test = tmp_path / "test_x.py"
    test.write_text(WARNS.format(module=module, category=category))
    words = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, test]
    done = subprocess.run([*words, "-p", "no:cacheprovider"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == is_error, done.stdout
    assert "1 failed" in done.stdout if is_error else "1 passed, 1 warning" in done.stdout
