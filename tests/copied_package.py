"""Command lines run by a copy of the package with files of its own, in a process that has imported torch already."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kills import SERVER
from problems.command_line import Invocation

PACKAGE = Path(__file__).parents[1] / "bnncli"


def run_with_files(
    files: Mapping[str, str],
    folder: Path,
    lines: Sequence[Sequence[object]],
    *,
    appended: Mapping[str, str] | None = None,
) -> list[Invocation]:
    """Run command lines by a copy of the package and return what each printed.

    Args:
        files: text of further files of the package, by path.
        folder: where the copy goes.
        appended: text to append to files of the package, by path, such as an entry of a table.
    """
    shutil.copytree(PACKAGE, folder / "bnncli", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in files.items():
        target = folder / "bnncli" / path
        assert not target.exists(), f"{path} is there already"
        target.write_text(text)
    for path, text in (appended or {}).items():
        with open(folder / "bnncli" / path, "a", encoding="utf-8") as file:
            file.write(f"\n\n{text}")
    process = SERVER.Process(target=_run_all, args=(folder, [[str(word) for word in words] for words in lines]))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0
    return [Invocation(*one) for one in json.loads((folder / "results.json").read_text())]


def _run_all(folder: Path, lines: list[list[str]]) -> None:
    """In the child: the lines, by the package in `folder`; what came of them in results.json."""
    for name in [name for name in sys.modules if name.split(".")[0] == "bnncli"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    execute = importlib.import_module("bnncli.cli.execute")
    assert Path(execute.__file__ or "").is_relative_to(folder)
    found = []
    for words in lines:
        results, messages = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(results):
            code = execute.run_command_line(words, results)
        found.append((code, results.getvalue(), messages.getvalue()))
    (folder / "results.json").write_text(json.dumps(found))
