"""JSON files that others wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from bnncli.errors import DataError, MissingInput
from bnncli.system import input_files


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"ä": [1, null]}', encoding="utf-8")
    assert input_files.read_object(tmp_path / "a.json") == {"ä": [1, None]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": ', "not a complete JSON file"),
        (b"\xff\xfe{", "not a complete JSON file"),
        (b"[" * 100_000, "not a complete JSON file"),
        (b"[1]", "expected a JSON object, got list"),
    ],
)
def test_what_is_no_object_is_told_of(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(DataError, match=message):
        input_files.read_object(tmp_path / "a.json")


def test_a_large_file_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_BYTES", 8)
    (tmp_path / "a.json").write_bytes(b'{"a": 12}')
    with pytest.raises(DataError, match="expected a small JSON file"):
        input_files.read_object(tmp_path / "a.json")


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingInput):
        input_files.read_object(tmp_path / "a.json")
