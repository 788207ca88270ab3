"""Publish files for people: figures, HTML pages, and tables of predictions as .csv or .npz.

An existing file is replaced only if bnncli wrote it.
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bnncli.artifacts.atomic import check_writable, publish, publish_bytes
from bnncli.artifacts.freshness import differences, is_same_file
from bnncli.errors import OutputExists, UsageError
from bnncli.figures import MARK as FIGURE_MARK
from bnncli.figures.pages import MARK, OPTIONS
from bnncli.numerics.digests import file_sha256


def check_side_output(
    target: Path, flag: str, kind: str, *, is_ours: Callable[[Path], bool], force: bool, others: Iterable[Path]
) -> None:
    """Raise before any work if a file for people may not be written to `target`.

    Args:
        flag: option that named it.
        kind: what is written, for messages: figure, table.
        is_ours: whether an existing file was written through this option, and may be replaced.
        force: whether any other file may be replaced.
        others: files of this command, which are never replaced.

    Raises:
        UsageError: target is one of the others.
        OutputExists: the folder is not writable, or a foreign file exists.
    """
    if any(is_same_file(target, other) or target.absolute() == other.absolute() for other in others):
        raise UsageError(f"{flag}: {target} is an input or another output of this command; choose another name")
    check_writable(target.parent, hint=f"choose another place with {flag}")
    if target.is_dir() or (target.exists() and not force and not (target.is_file() and is_ours(target))):
        what = "is a folder" if target.is_dir() else f"exists and is not a {kind} created by bnncli"
        hint = f"give another name to {flag}" + ("" if target.is_dir() else ", or add \0force\0 to replace it")
        raise OutputExists(f"{target} {what}", hint=hint, path=target)


_MAX_BYTES = 1 << 24  # larger files are not bnncli's


def check_figure_path(target: Path, flag: str, *, force: bool, others: Iterable[Path]) -> None:
    """Raise before any work if a figure may not be written to `target`.

    Args:
        flag: option that named it.
        force: whether a file other than bnncli's figures may be replaced.
        others: files of this command, which are never replaced.

    Raises:
        UsageError: target is one of the others.
        OutputExists: the folder is not writable, or a foreign file exists.
    """
    check_side_output(target, flag, "figure", is_ours=_is_our_figure, force=force, others=others)


def write_figure(target: Path, content: bytes) -> str:
    """Publish a figure at a checked path, and return the digest of its bytes."""
    publish_bytes(target, content, may_replace=True)
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _is_our_figure(path: Path) -> bool:
    return path.stat().st_size <= _MAX_BYTES and FIGURE_MARK.encode() in path.read_bytes()


_LOOKED_AT = 1 << 16  # bytes: mark and options are in the head
_OPTIONS = re.compile(rf'<meta name="{OPTIONS}" content="([^"]*)">')


def check_page_path(
    target: Path, flag: str, options: Mapping[str, Any], *, force: bool, others: Iterable[Path]
) -> None:
    """Raise before any work if a page may not be written to `target`.

    Args:
        flag: option that named it.
        options: options of the page.
        force: whether a file that is not bnncli's page, or has other options, may be replaced.
        others: files of this command, which are never replaced.

    Raises:
        UsageError: target is one of the others.
        OutputExists: the folder is missing or not writable, or a foreign file or a page with other options exists.
    """
    folder = target.parent
    if not folder.exists():
        hint = f"create the folder, or choose another place with {flag}"
        raise OutputExists(f"{flag}: no folder {folder}", hint=hint, code="not_writable", path=folder)
    check_side_output(target, flag, "report", is_ours=_is_our_page, force=force, others=others)
    recorded = _read_page_options(target)
    if recorded is not None and recorded != options and not force:
        raise OutputExists(
            f"{target} already exists with other options ({differences(recorded, options)})",
            hint=f"add \0force\0 to replace it, or {flag} FILE to keep both",
            path=target,
        )


def _read_page_options(path: Path) -> dict[str, Any] | None:
    """Return the options recorded in a page; None if there is none, or it has no record."""
    if not path.is_file():
        return None
    with open(path, "rb") as stream:
        found = _OPTIONS.search(stream.read(_LOOKED_AT).decode(errors="replace"))
    try:
        told = json.loads(html.unescape(found[1])) if found is not None else None
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def write_page(target: Path, content: bytes) -> str:
    """Publish a page at a checked path, and return the digest of its bytes."""
    publish_bytes(target, content, may_replace=True)
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _is_our_page(path: Path) -> bool:
    with open(path, "rb") as stream:
        return MARK.encode() in stream.read(_LOOKED_AT)


Array = np.ndarray[Any, Any]
ORIGIN = ("split", "posterior", "variant")
FIRST_COLUMNS = ("sample_id", *ORIGIN, "predicted", "probability")  # for multi-label all but the last
PREDICTED = "predicted"
CLASS_COLUMNS = (PREDICTED, "label")
TOP_K = "top_k"
JOINED = (PREDICTED, TOP_K)  # several values per row, joined in one cell
NAME = "name"
PROBABILITIES = "probabilities"
_MARK = "bnncli_table"
_ROWS = 1 << 16  # of a text column at once
_CELLS = 1 << 18  # of a CSV file at once


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a table.

    Attributes:
        origin: split, posterior and variant of all these rows.
        columns: name to (n,): integers (class indices in class columns) or real numbers; top_k is (n, k), class indices
            by rank, padded with -1; texts, such as name, are (n,) UTF-8 bytes. Others are (n, K), with a CSV column per class:
            probabilities, and for multi-label the values of each label; predicted is then zeros and ones, in CSV the
            names of the ones.
        sets: names of columns that are sets of classes: (n, K) zeros and ones, or -1 for none; in CSV names.
        is_raw: write texts to CSV unchanged, even if a spreadsheet would take them for formulas.
    """

    origin: tuple[str, str, str]
    columns: dict[str, Array]
    sets: frozenset[str] = frozenset()
    is_raw: bool = False


def is_table(path: Path) -> bool:
    """Return whether a file is a table written here."""
    if path.suffix.lower() == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                return f"{_MARK}.npy" in archive.namelist()
        except (zipfile.BadZipFile, OSError):
            return False
    with open(path, "rb") as stream:
        return stream.read(1024).startswith(",".join(FIRST_COLUMNS[:-1]).encode() + b",")  # identifies our tables


def write_table(target: Path, blocks: Iterable[TableBlock], classes: Sequence[str]) -> str:
    """Publish a table in the format of its suffix, and return the digest of its bytes."""
    write = _write_npz if target.suffix.lower() == ".npz" else _write_csv
    publish(target, lambda path: write(path, blocks, classes), may_replace=True)
    return f"sha256:{file_sha256(target)}"


def csv_header(block: TableBlock, classes: Sequence[str]) -> bytes:
    """Return the CSV title line for these rows."""
    text = io.StringIO(newline="")
    _write_titles(text, block, classes)
    return text.getvalue().encode()


def csv_bytes(block: TableBlock, classes: Sequence[str]) -> bytes:
    """Return the rows as CSV lines."""
    text = io.StringIO(newline="")
    _writer(text).writerows(_text_rows(block, classes))
    return text.getvalue().encode()


def _write_csv(path: Path, blocks: Iterable[TableBlock], classes: Sequence[str]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as stream:
        for number, block in enumerate(blocks):
            if number == 0:
                _write_titles(stream, block, classes)
            _writer(stream).writerows(_text_rows(block, classes))


def _write_titles(stream: TextIO, block: TableBlock, classes: Sequence[str]) -> None:
    titles = [title for name in _order(block) for title in _titles(block, name, classes)]
    _writer(stream).writerow(titles if block.is_raw else map(escape_formula, titles))


def _writer(stream: TextIO) -> Any:
    return csv.writer(stream, lineterminator="\r\n")


def _order(block: TableBlock) -> list[str]:
    """Return the names of all columns: identifying ones first, then example names; probabilities last."""
    first, *others = [name for name in block.columns if name not in (NAME, PROBABILITIES)]
    ordered = [first, *ORIGIN, *others]
    count = sum(name in FIRST_COLUMNS for name in ordered)
    return [*ordered[:count], *({NAME} & {*block.columns}), *ordered[count:], *({PROBABILITIES} & {*block.columns})]


def probability_columns(classes: Sequence[str]) -> list[str]:
    """Return the CSV titles of the class probabilities."""
    return [f"p_{name}" for name in classes]


def _titles(block: TableBlock, name: str, classes: Sequence[str]) -> list[str]:
    """Return the CSV titles of a column, one per class for per-class columns."""
    if name == PROBABILITIES:
        return probability_columns(classes)
    is_of_each = name not in (*ORIGIN, *JOINED, *block.sets) and block.columns[name].ndim == 2
    return [f"{name}_{one}" for one in classes] if is_of_each else [name]


def _text_rows(block: TableBlock, classes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows as cells, in blocks of rows."""
    origin = dict(zip(ORIGIN, block.origin, strict=True))
    count = len(next(iter(block.columns.values())))
    size = max(1, _CELLS // (len(block.columns) + len(classes)))
    for start in range(0, count, size):
        cells: list[list[str]] = []
        for name in _order(block):
            if name in origin:
                cells.append([origin[name]] * min(size, count - start))
            else:
                cells += _texts(block, name, block.columns[name][start : start + size], classes)
        yield from zip(*cells, strict=True)


def _texts(block: TableBlock, name: str, values: Array, classes: Sequence[str]) -> list[list[str]]:
    """Return the cells of a column, or of each CSV column that it has."""
    if values.ndim == 2 and name not in JOINED and name not in block.sets:
        return [_numbers(column) for column in values.T]
    cells = _join_classes(values, classes) if name in block.sets else _cells(name, values, classes)
    is_text = values.dtype.kind == "S" or name in (*JOINED, *CLASS_COLUMNS) or name in block.sets
    return [list(map(escape_formula, cells)) if is_text and not block.is_raw else cells]


def escape_formula(text: str) -> str:
    """Prefix a text with ' if a spreadsheet would take it for a formula and it is not a number.

    A text from which `as_it_was` would remove a ' gets one more.
    """
    if not text.lstrip("'").startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def unescape_formula(cell: str) -> str:
    """Invert `no_formula`."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_FORMULA) else cell


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def _cells(name: str, values: Array, classes: Sequence[str]) -> list[str]:
    if values.dtype.kind == "S":
        return [value.decode() for value in values.tolist()]
    if name == TOP_K:
        return [";".join(_escape_separators(classes[k]) for k in row if k >= 0) for row in values.tolist()]
    if name == PREDICTED and values.ndim == 2:
        return _join_classes(values, classes)
    if name in CLASS_COLUMNS:
        return [classes[k] if k >= 0 else "" for k in values.tolist()]
    return _numbers(values)


def _join_classes(values: Array, classes: Sequence[str]) -> list[str]:
    """Join the names of the classes marked in each row into one cell."""
    escaped = [_escape_separators(one) for one in classes]
    return [";".join(escaped[k] for k in np.flatnonzero(row > 0)) for row in values]


def _numbers(values: Array) -> list[str]:
    """Return numbers as cells, empty for missing ones."""
    if values.dtype.kind == "f":
        return ["" if math.isnan(value) else format(value, ".9g") for value in values.tolist()]
    return ["" if value == -1 else str(value) for value in values.tolist()]


def _escape_separators(name: str) -> str:
    """Escape semicolons and backslashes in a class name within a list."""
    return name.replace("\\", "\\\\").replace(";", "\\;")


def _write_npz(path: Path, blocks: Iterable[TableBlock], classes: Sequence[str]) -> None:
    """Write an npz file, holding the numbers of all rows in memory and generating texts on the fly."""
    origins: list[tuple[str, str, str]] = []
    counts: list[int] = []
    columns: dict[str, list[Array]] = {}
    for block in blocks:
        origins.append(block.origin)
        counts.append(len(next(iter(block.columns.values()))))
        for name, values in block.columns.items():
            columns.setdefault(name, []).append(values)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _write_texts(archive, _MARK, ["bnncli.table/1"], [1])
        _write_texts(archive, "classes", classes, [1] * len(classes))
        for axis, name in enumerate(ORIGIN):
            _write_texts(archive, name, [origin[axis] for origin in origins], counts)
        for name, parts in columns.items():
            with _member(archive, name) as stream:
                joined = np.concatenate(_pad_parts(parts) if name == TOP_K else parts)
                joined = np.char.decode(joined, "utf-8") if joined.dtype.kind == "S" else joined
                np.lib.format.write_array(stream, joined, allow_pickle=False)


def _pad_parts(parts: list[Array]) -> list[Array]:
    width = max(part.shape[1] for part in parts)
    return [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in parts]


def _write_texts(archive: zipfile.ZipFile, name: str, values: Sequence[str], counts: Sequence[int]) -> None:
    """Write a text array with repeated values, without holding it in memory."""
    kind = np.array(list(values) or [""]).dtype
    with _member(archive, name) as stream:
        description = {"descr": kind.str, "fortran_order": False, "shape": (sum(counts),)}
        np.lib.format.write_array_header_1_0(stream, description)
        for value, count in zip(values, counts, strict=True):
            for start in range(0, count, _ROWS):
                stream.write(np.full(min(_ROWS, count - start), value, dtype=kind).tobytes())


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    """Open a member with a fixed date, so that equal numbers give equal bytes."""
    return archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True)
