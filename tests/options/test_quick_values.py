"""Values of a command line that are read without pydantic are what Typer itself makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperCommand
from typer.main import get_command

from bnncli.cli.options import QuickCommand

INTEGERS = ["0", "7", "-3", "007", "1_000", "+4", " 5", "1.0", "1e3", "x", "", "9" * 18, "9" * 40, "٣"]
FLOATS = [
    "0",
    "0.5",
    "-2.50",
    "1e-3",
    "1E5",
    "1e+5",
    ".5",
    "5.",
    "nan",
    "inf",
    "1_0.5",
    "0x1",
    "",
    "1e400",
    "12345678.90123456789",
]
TEXTS = ["", "a b", "-", "é", "1"]


def read(cls: type[TyperCommand], hint: Any, words: list[str]) -> Any:
    """What a command of this class reads, or its complaint."""
    app = typer.Typer()

    def command(value=None):  # type: ignore[no-untyped-def]
        return value

    command.__annotations__ = {"value": Annotated[hint, typer.Option()]}
    app.command(cls=cls)(command)
    try:
        return get_command(app)(args=words, standalone_mode=False)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("hint", "texts"),
    [(int, INTEGERS), (float, FLOATS), (str, TEXTS), (Path, ["a", "a/../b", "/"]), (int | None, INTEGERS)],
)
def test_one_value_is_what_typer_makes_of_it(hint: Any, texts: list[str]) -> None:
    for words in [[], *(["--value", text] for text in texts)]:
        quick, own = read(QuickCommand, hint, words), read(TyperCommand, hint, words)
        assert (type(quick), repr(quick)) == (type(own), repr(own)), words


def test_several_values_are_what_typer_makes_of_them() -> None:
    for hint, texts in (
        (list[str], ["a", ""]),
        (list[Path], ["a", "b/"]),
        (list[int], ["1", "x"]),
        (list[float], ["1", "2e3"]),
    ):
        for count in range(len(texts) + 1):
            words = [word for text in texts[:count] for word in ("--value", text)]
            assert read(QuickCommand, hint, words) == read(TyperCommand, hint, words), (hint, words)


def test_plain_values_are_read_without_pydantic() -> None:
    code = (
        "import sys; from bnncli.cli.build import parser\n"
        "found = parser()(args='hmc a.pt --chains 8 --name n --force --target-accept 0.5'.split(), standalone_mode=False)\n"
        "assert found[1]['chains'] == 8 and found[1]['target_accept'] == 0.5, found\n"
        "print('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
