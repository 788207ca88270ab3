"""Columns of plain text read many lines at once, against the same file row by row and against `float`."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bnncli.data import delimited
from bnncli.data.delimited import DelimitedTable, plain_text
from bnncli.data.tables import numbers_of
from bnncli.errors import DataError

PARSERS = ("pyarrow", "numpy")


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pyarrow, and as if it were not installed."""
    if request.param == "numpy":
        monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    else:
        pytest.importorskip("pyarrow.csv")


@pytest.fixture(params=[9, 1 << 22])
def small_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of lines ends in almost every one of them, or nowhere."""
    monkeypatch.setattr(delimited, "_RUN", request.param)


def table_of(path: Path, text: str | bytes) -> DelimitedTable:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return DelimitedTable(path, delimiter=",")


def read(table: DelimitedTable, names: Sequence[str]) -> np.ndarray:
    return numbers_of(table, names, table.values([])[0], "'t.csv'")


def bits(values: object) -> list[int]:
    return np.array(values, np.float64).view(np.uint64).ravel().tolist()


def spellings(generator: np.random.Generator) -> list[str]:
    """Finite numbers of any exponent, as they are and at other lengths, and those that round off just half-way."""
    anything = generator.integers(0, 1 << 63, 2000).view(np.float64)
    values = [value for value in anything.tolist() if np.isfinite(value)] + generator.random(500).tolist()
    half = [f"{9007199254740993 + 2 * k}{tail}" for k in range(40) for tail in ("", ".0", ".00000000000000000001")]
    forms = ("", ".17e", ".25g", ".3f")
    return [f"{(-1) ** k * value:{forms[k % 4]}}" for k, value in enumerate(values)] + half


def test_numbers_are_those_nearest_to_the_text(tmp_path: Path, parser: None) -> None:
    texts = spellings(np.random.default_rng(0))
    texts += [
        "0",
        "-0.0",
        ".5",
        "5.",
        "1E5",
        "1e+05",
        "4.9e-324",
        "2.5e-324",
        "1e-400",
        "1.7976931348623157e308",
        " 7 ",
    ]
    texts += ["0.1" + "0" * 400 + "1"]
    table = table_of(
        tmp_path / "t.csv", "id,a,b\n" + "".join(f"x,{text},{texts[-1 - k]}\n" for k, text in enumerate(texts))
    )
    expected = [[float(text), float(texts[-1 - k])] for k, text in enumerate(texts)]
    assert table.values(["id"])[0] == len(texts)
    assert bits(read(table, ["a", "b"])) == bits(expected)
    assert bits(read(table, ["b", "a"])) == bits(np.array(expected)[:, ::-1])


def test_common_numbers_are_read_at_once(tmp_path: Path, parser: None, small_runs: None) -> None:
    values = np.random.default_rng(1).normal(size=(50, 3))
    rows = [",".join(map(repr, row)) for row in values.tolist()]
    for end in ("\n", "\r\n"):
        table = table_of(tmp_path / "t.csv", "é,b,ü" + end + end.join(rows))
        assert table.values([])[0] == 50
        found = table.numbers(["ü", "é"])
        assert found is not None
        assert bits(found) == bits(values[:, [2, 0]])


ODD = [
    "nan",
    "inf",
    "-Infinity",
    "1_0",
    "+1",
    "１２",
    "1e999",
    "\u2009 3",
    '"4"',
    '"5,5"',
    "0x10",
    "1d5",
    "1e",
    "NA",
    "",
    "1 2",
    "nan(1)",
    "1\0",
]


@pytest.mark.parametrize("odd", ODD)
def test_other_numbers_are_what_float_takes_them_for(tmp_path: Path, parser: None, odd: str) -> None:
    table = table_of(tmp_path / "t.csv", f"a,b\n0.25,0\n0.5,{odd}\n")
    table.values([])
    try:
        expected = float(odd.strip('"'))
    except ValueError:
        came = re.escape(repr(odd.strip('"'))) if odd else "nothing"
        with pytest.raises(DataError, match=f"'t.csv': row 1, column 'b': expected a number, got {came}"):
            read(table, ["a", "b"])
    else:
        assert bits(read(table, ["a", "b"])) == bits([[0.25, 0], [0.5, expected]])


FIELDS = ["a", "1", " é ", "", '"q"', "x" * 30, "\u2028", ";"]
ODD_FIELDS = ['"', 'a"b', '"a,b"', '"a\nb"', '"a""b"', "\r", "a\rb", "\0", '""', '"\r"', "\n"]


def odd_table(chosen: random.Random) -> bytes:
    """Two columns, most of them plain; some with odd fields, some with rows of other lengths or stray bytes."""
    fields = FIELDS + chosen.choice([[], [], ODD_FIELDS])
    lengths = chosen.choice([[2], [2], [2, 2, 2, 1, 3]])
    lines = [",".join(chosen.choices(fields, k=chosen.choice(lengths))) for _ in range(chosen.randrange(1, 7))]
    end = chosen.choice(["\n", "\r\n"])
    data = ("k,l" + end + end.join(lines) + chosen.choice(["", end, end + end])).encode()
    return data if chosen.random() < 0.9 else data + b"\xff"


def test_texts_and_places_of_rows_are_those_that_single_rows_have(tmp_path: Path, small_runs: None) -> None:
    chosen, times = random.Random(0), {"plain": 0, "odd": 0, "damaged": 0}
    for _ in range(300):
        data = odd_table(chosen)
        try:
            table = table_of(tmp_path / "t.csv", data)
        except DataError:
            continue
        plain, starts = table._plain_values(["l", "k", "l"]), table._starts.tolist()
        try:
            expected = table._all_values(["l", "k", "l"])
        except DataError:
            assert plain is None, data
            times["damaged"] += 1
        else:
            assert plain in (None, expected), data
            assert plain is None or starts == table._starts.tolist(), data
            times["odd" if plain is None else "plain"] += 1
    assert min(times.values()) > 25, times


def test_empty_lines_of_a_single_column_are_no_rows(tmp_path: Path, small_runs: None) -> None:
    for body in ("1\n\n2\n", "\n1\n2\n", "1\n2\n\n", "1\r\n\r\n2"):
        table = table_of(tmp_path / "t.csv", "a\n" + body)
        assert table.values(["a"]) == (2, [["1", "2"]])
        assert bits(read(table, ["a"])) == bits([[1.0], [2.0]])


def test_carriage_returns_within_fields_are_not_plain() -> None:
    assert plain_text(b"a,b\r\nc,d", ",") == b"a,b\nc,d\n"
    assert plain_text(b"a\rb,c\n", ",") is None


def test_damage_beyond_the_first_rows_is_seen(tmp_path: Path, small_runs: None) -> None:
    for damage in (b"a", b"a,b,c", b'a,"b"c', b'a,"b', b"caf\xe9,b", b"a,\xff"):
        table = table_of(tmp_path / "t.csv", b"k,l\n" + b"a,b\n" * 150 + damage + b"\n")
        with pytest.raises(DataError, match="row 150 \\(line 152\\)"):
            table.values(["l"])


def test_quotation_marks_around_plain_fields_are_plain(tmp_path: Path) -> None:
    table = table_of(tmp_path / "t.csv", '"p_a";"y";"z"\n0.5;"cat";"1,5"\n"0.25";"dog";2\n')
    assert table._plain_values(["y", "z"]) == (2, [["cat", "dog"], ["1,5", "2"]])
    assert table.read(np.arange(2), ["y"]) == [["cat", "dog"]]
    assert bits(table.numbers(["p_a"])) == bits([0.5, 0.25])


def test_a_file_that_grows_or_shrinks_between_is_not_read_at_once(tmp_path: Path, parser: None) -> None:
    for now in ("a\n1\n2\n3\n", "a\n1\n"):
        table = table_of(tmp_path / "t.csv", "a\n1\n2\n")
        assert table.values([])[0] == 2
        (tmp_path / "t.csv").write_text(now)
        assert table.numbers(["a"]) is None
