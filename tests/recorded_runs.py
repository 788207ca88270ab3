"""Records what the command line does, on small inputs, and tells what has changed since.

The lines are those of recorded_lines.py. Of each are recorded: its exit code, stdout and stderr, and every file that it wrote,
changed or removed, with the header and a few numbers of each array (recorded_files.py).

    python tests/recorded_runs.py --record          # behaviour was meant to change: writes recorded_runs.json anew
    python tests/recorded_runs.py                   # compares with recorded_runs.json, as test_recorded_runs.py does
    python tests/recorded_runs.py --write FILE      # strict: all digits and a digest of every array, on this machine
    python tests/recorded_runs.py --compare FILE    # exits 1 and says which line differs in what

recorded_runs.json holds on other processors and releases of torch: numbers agree to each line's tolerance, or to one unit of the last
printed digit; digests are masked. A strict record holds on one machine with one installation and thread count, and is for changes that
must change nothing: only times, folders and the state of the checkout are masked. Help texts are not recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from recorded_files import describe, flatten
from recorded_lines import LINES, ROUNDED, Line, make_inputs

from bnncli.figures import MARK

RECORD = Path(__file__).with_name("recorded_runs.json")
Record = dict[str, Any]

_TIMES = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)"), "<time>"),
    (re.compile(r"\b\d+(\.\d+)? ?(ms|s|seconds)\b"), "<duration>"),
)
_DIGEST = (re.compile(r"(?<![\w.])(bnn-sha256/1:|sha256:)?[0-9a-f]{12,64}\b"), "<digest>")
_PROGRESS = re.compile(r" (eta|took)=")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def run_lines(is_strict: bool, lines: tuple[Line, ...] = LINES) -> list[Record]:
    """Run every line in a new folder, and return what each did."""
    drawing = contextlib.nullcontext() if is_strict else _names_for_pictures()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _plain_environment(), drawing:
        make_inputs()
        return [_run(line, is_strict) for line in lines]


@contextlib.contextmanager
def _plain_environment() -> Iterator[None]:
    """No settings of the user's, and no warnings of others' packages in what is recorded."""
    kept = dict(os.environ)
    for name in [*(name for name in kept if name.startswith("BNNCLI_")), "SOURCE_DATE_EPOCH"]:
        os.environ.pop(name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module=r"bnncli(\.|$)")
            yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextlib.contextmanager
def _names_for_pictures() -> Iterator[None]:
    """Of the pictures of a report a record that is not strict has the places alone, and they took a third of its time."""
    from bnncli.commands import report
    from bnncli.figures import pages

    with (
        mock.patch.object(pages, "inline_svg", lambda shown: f"<svg><title>{shown.name}</title></svg>"),
        mock.patch.object(report, "figure_file", lambda shown, form: f"{MARK} {shown.name} {form}".encode()),
    ):
        yield


def _run(line: Line, is_strict: bool) -> Record:
    from bnncli.cli.execute import run_command_line

    if line.before is not None:
        line.before()
    before = _states()
    results, errors = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stderr(errors):
        code = run_command_line(line.argv, results)
    after = _states()
    files = {}
    for path in sorted(before.keys() | after.keys()):
        if path not in after:
            files[path] = ["removed"]
        elif before.get(path) != after[path]:
            files[path] = [_masked(text, is_strict) for text in describe(Path(path), is_strict)]
    return {
        "line": f"bnncli {line.words}",
        "exit": code,
        "stdout": [_masked(text, is_strict) for text in _stdout(line, results.getvalue(), is_strict)],
        "stderr": [_masked(text, is_strict) for text in _stderr(errors)],
        "files": files,
    }


def _states() -> dict[str, tuple[int, int, int]]:
    """Every file of the folder but locks, with what tells that it was written."""
    paths = [path for path in Path().rglob("*") if path.is_file() and ".locks" not in path.parts]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def _stdout(line: Line, text: str, is_strict: bool) -> list[str]:
    if line.is_help:
        return re.findall(r"^  ([a-z][a-z-]+)  ", text.partition("Start:")[2], re.MULTILINE)
    if "--json" in line.argv and text:
        return list(flatten(json.loads(text), is_strict))
    return text.splitlines()


def _stderr(stream: io.TextIOWrapper) -> list[str]:
    text = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    return [line for line in text.splitlines() if not _PROGRESS.search(line)]


def _masked(text: str, is_strict: bool) -> str:
    """Without times and folders; else without digests and the widths of columns too."""
    for pattern, mask in _TIMES if is_strict else (*_TIMES, _DIGEST):
        text = pattern.sub(mask, text)
    text = text.replace(os.getcwd(), "<folder>")
    return text if is_strict else re.sub(r" {2,}", " ", re.sub(r"-{3,}", "---", text)).strip()


def differences(expected: list[Record], found: list[Record], is_strict: bool) -> list[str]:
    """What differs, each with the number and the words of its line; empty where nothing does."""
    lines = [record["line"] for record in expected]
    if lines != [record["line"] for record in found]:
        return ["the lines are not those of the record: record them anew with --record"]
    told = []
    tolerances = {f"bnncli {line.words}": line.tolerance for line in LINES}
    for number, (was, now) in enumerate(zip(expected, found, strict=True)):
        tolerance = None if is_strict else tolerances.get(was["line"], ROUNDED)
        told += [f"[{number}] {was['line']}\n    {text}" for text in _differences_of_line(was, now, tolerance)]
    return told


def _differences_of_line(was: Record, now: Record, tolerance: float | None) -> Iterator[str]:
    if was["exit"] != now["exit"]:
        yield f"exit code: expected {was['exit']}; got {now['exit']}"
    for stream in ("stdout", "stderr"):
        yield from _differences_of_text(stream, was[stream], now[stream], tolerance)
    for path in sorted(was["files"].keys() | now["files"].keys()):
        if path not in now["files"]:
            yield f"{path}: expected to be written or removed; was not touched"
        elif path not in was["files"]:
            yield f"{path}: not expected to be touched; was written or removed"
        else:
            yield from _differences_of_text(path, was["files"][path], now["files"][path], tolerance)


def _differences_of_text(where: str, was: list[str], now: list[str], tolerance: float | None) -> Iterator[str]:
    """Lines that are matched by their words and compared by their numbers; with no tolerance, by every character."""
    shape = (lambda text: text) if tolerance is None else (lambda text: _NUMBER.sub("#", text))
    matcher = difflib.SequenceMatcher(
        None, [shape(text) for text in was], [shape(text) for text in now], autojunk=False
    )
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "replace" and i2 - i1 == j2 - j1:
            for old, new in zip(was[i1:i2], now[j1:j2], strict=True):
                yield "{}: expected {!r}; got {!r}".format(where, *_around_change(old, new))
        elif kind != "equal":
            yield f"{where}: expected {_shown(was[i1:i2])}; got {_shown(now[j1:j2])}"
        elif tolerance is not None:
            for old, new in zip(was[i1:i2], now[j1:j2], strict=True):
                is_printed = where in ("stdout", "stderr") and not old.startswith((".", ":", "array "))
                if (far := _far_number(old, new, tolerance, is_printed)) is not None:
                    yield f"{where}: {far[0]} became {far[1]} (tolerance {tolerance:g}) in {_cut(old)!r}"


def _cut(line: str) -> str:
    return line if len(line) <= 240 else f"{line[:240]} ..."


def _shown(lines: list[str]) -> str:
    return (
        " | ".join(repr(_cut(line)) for line in lines[:4]) + (" ..." if len(lines) > 4 else "") if lines else "nothing"
    )


def _around_change(old: str, new: str, margin: int = 60) -> tuple[str, str]:
    """Two long lines, cut down to where they differ."""
    start = _common(old, new)
    end = min(_common(old[::-1], new[::-1]), len(old) - start, len(new) - start)
    first = max(0, start - margin)
    texts = [text[first : len(text) - max(0, end - margin)] for text in (old, new)]
    return (old, new) if len(old) < 2 * margin else (texts[0], texts[1])


def _common(one: str, other: str) -> int:
    """Characters that two texts have in common at their start."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _far_number(old: str, new: str, tolerance: float, is_printed: bool) -> tuple[str, str] | None:
    """The first pair of numbers that lie too far apart: relative to an array's size, else to the number, at least 1."""
    before, after = _NUMBER.findall(old), _NUMBER.findall(new)
    is_array = old.startswith("array ") and ": " in old
    size = abs(float(_NUMBER.findall(old.rpartition(": ")[2])[1])) if is_array else 1.0  # root mean square
    for one, other in zip(before, after, strict=True):
        a, b = float(one), float(other)
        scale = size if is_array else max(1.0, abs(a))
        unit = (
            max(_unit(one), _unit(other)) if is_printed else 1e-5 * max(size if is_array else 0.0, abs(a))
        )  # 6 digits
        if abs(a - b) > max(tolerance * scale, unit) * (1 + 1e-9):
            return one, other
    return None


def _unit(number: str) -> float:
    """One unit of the last digit; 0 of a whole number, which is exact but for the tolerance."""
    digits, _, exponent = number.lower().partition("e")
    places = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - places) if places or exponent else 0.0


def save(path: Path, records: list[Record]) -> None:
    """Every text once and on a line of its own, so that a change of one is one line of a diff; records point to them."""
    places: dict[str, int] = {}

    def indexed(texts: list[str]) -> list[int]:
        return [places.setdefault(text, len(places)) for text in texts]

    rows = [
        record
        | {stream: indexed(record[stream]) for stream in ("stdout", "stderr")}
        | {"files": {file: indexed(texts) for file, texts in record["files"].items()}}
        for record in records
    ]
    parts = [
        ",\n".join(json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in part)
        for part in (places, rows)
    ]
    path.write_text(f'{{"texts":[\n{parts[0]}\n],"records":[\n{parts[1]}\n]}}\n', encoding="utf-8")


def load(path: Path) -> list[Record]:
    """What `save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    texts = content["texts"]
    return [
        record
        | {stream: [texts[place] for place in record[stream]] for stream in ("stdout", "stderr")}
        | {"files": {file: [texts[place] for place in places] for file, places in record["files"].items()}}
        for record in content["records"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--record", action="store_true", help="write recorded_runs.json anew")
    action.add_argument("--write", type=Path, metavar="FILE", help="write a strict record")
    action.add_argument("--compare", type=Path, metavar="FILE", help="compare with a strict record")
    options = parser.parse_args()
    is_strict = bool(options.write or options.compare)
    found = run_lines(is_strict)
    if options.record or options.write:
        save(options.write or RECORD, found)
        return 0
    told = differences(load(options.compare or RECORD), found, is_strict)
    print("\n".join(told) or f"{len(found)} lines, no difference")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
