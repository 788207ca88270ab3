"""The user's code and files: what misbehaves is named, whatever it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.data.labels import MAX_CLASSES
from bnncli.errors import DataError, MissingInput
from bnncli.models.checkpoints import load_checkpoint
from bnncli.system import input_files
from bnncli.system.user_code import load_factory

NETWORK = """
import sys, torch
class make(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    def forward(self, x):
        {forward}
"""
SOURCES = {
    "a factory that asks to stop": ("def make():\n    raise KeyboardInterrupt", 65, "raised KeyboardInterrupt"),
    "an exception of no ordinary kind": ("class E(BaseException): pass\ndef make():\n    raise E('x')", 65, "raised E: x"),
    "an exception without words": (
        "class E(Exception):\n    def __str__(self):\n        raise ValueError\ndef make():\n    raise E", 65, "raised E:",
    ),
    "an import that asks to stop": ("raise KeyboardInterrupt", 2, "failed: KeyboardInterrupt"),
    "an import that exits": ("import sys; sys.exit(3)", 2, "called exit(3)"),
    "arguments that cannot be told": ("class M:\n    __signature__ = 3\n    def __call__(self): pass\nmake = M()", 2, "cannot determine the factory's arguments"),
    "no end": ("def make():\n    return make()", 65, "RecursionError"),
    "no network": ("def make():\n    yield 3", 2, "expected a torch.nn.Module"),
    "a network that asks to stop": (NETWORK.format(forward="raise KeyboardInterrupt"), 65, "KeyboardInterrupt"),
    "a network that exits": (NETWORK.format(forward="sys.exit(0)"), 2, "called exit(0)"),
    "a network that gives nothing": (NETWORK.format(forward="return None"), 65, "NoneType"),
    "words of a terminal": ("def make():\n    raise ValueError('\\x1b[2J\\u202e')", 65, "\\x1b[2J\\u202e"),
}  # fmt: skip


def check(done: Any, code: int, said: str) -> None:
    assert done.code == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.json["ok"]


@pytest.mark.parametrize("case", SOURCES)
def test_code_that_misbehaves_is_named(cli: Cli, tmp_path: Path, case: str) -> None:
    source, code, said = SOURCES[case]
    (tmp_path / "net.py").write_text(source)
    torch.save({"1.weight": torch.ones(3, 4), "1.bias": torch.ones(3)}, tmp_path / "net.pt")
    np.savez(tmp_path / "d.npz", x=np.ones((6, 4), np.float32), y=np.arange(6) % 3)
    words = ("--model", f"{tmp_path}/net.py:make", "--data", f"train=npz:{tmp_path}/d.npz", "--json")
    check(cli("extract-features", tmp_path / "net.pt", *words), code, said)


DATA_SET = """
import torch
class Rows:
    {attribute}
    def __len__(self):
        {length}
    def __getitem__(self, i):
        return {item}
"""
DATA_SETS = {
    "a meta tensor": {"item": "torch.ones(3, device='meta'), 1", "said": "expected a dense one"},
    "a nested tensor": {"item": "torch.nested.nested_tensor([torch.ones(2)]), 1", "said": "expected a dense one"},
    "a sparse tensor": {"item": "torch.eye(3).to_sparse(), 1", "said": "expected a dense one"},
    "a ragged list": {"item": "[[1], [1, 2]], 1", "said": "cannot convert the input to an array"},
    "a list in itself": {"item": "(lambda a: (a.append(a), a)[1])([]), 1", "said": "cannot convert the input to an array"},
    "a ragged label": {"item": "torch.ones(3), [[1], [1, 2]]", "said": "cannot convert the label to a number"},
    "a label beyond all classes": {"item": "torch.ones(3), 2**62", "said": f"at most {MAX_CLASSES - 1}"},
    "a label beyond all numbers": {"item": "torch.ones(3), 10**30", "said": "labels must be integers"},
    "a label that is not a number": {"item": "torch.ones(3), float('nan')", "said": "labels must be integers"},
    "a negative length": {"length": "return -1", "said": "should return >= 0"},
    "a length of a half": {"length": "return 2.5", "said": "len() raised TypeError"},
    "a length beyond all numbers": {"length": "return 10**30", "said": "len() raised OverflowError"},
    "a length that raises": {"length": "raise KeyError('x')", "said": "len() raised KeyError"},
    "classes that raise": {"attribute": "classes = property(lambda self: 1 / 0)", "said": "raised ZeroDivisionError"},
    "a class name with NUL": {"attribute": "classes = ['a', 'b', '\\0']", "said": "NUL"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", DATA_SETS)
def test_a_data_set_that_misbehaves_is_named(cli: Cli, tmp_path: Path, case: str) -> None:
    good = {"attribute": "", "length": "return 6", "item": "torch.ones(3) * i, i % 3"}
    (tmp_path / "rows.py").write_text(DATA_SET.format(**{**good, **DATA_SETS[case]}))
    words = ("--model", "flatten", "--data", f"train=py:{tmp_path}/rows.py:Rows", "--json")
    check(cli("extract-features", tmp_path / "run", *words), 65, DATA_SETS[case]["said"])


@pytest.mark.parametrize("label", [MAX_CLASSES, 2**62, 2**64 - 1])
@pytest.mark.parametrize("way", ["--data", "--from-npz"])
def test_labels_of_more_classes_than_there_can_be_are_refused_at_once(
    cli: Cli, tmp_path: Path, label: int, way: str
) -> None:
    labels = np.array([0, label], dtype=np.uint64)
    names = ("x", "y") if way == "--data" else ("features_train", "labels_train")
    np.savez(tmp_path / "d.npz", **dict(zip(names, (np.ones((2, 3), np.float32), labels), strict=True)))
    given = ("--model", "flatten", way, f"train=npz:{tmp_path}/d.npz") if way == "--data" else (way, tmp_path / "d.npz")
    check(cli("extract-features", tmp_path / "run", *given, "--json"), 65, f"row 1 has {label}, expected at most")


def test_a_place_that_no_file_system_has_is_66(cli: Cli, tmp_path: Path) -> None:
    for place in ("npz:" + "a" * 5000, "idx:" + "a" * 5000, "images:" + "a" * 5000, "npz:" + "a" * 300 + "@3"):
        check(
            cli("extract-features", tmp_path / "run", "--model", "flatten", "--data", f"train={place}", "--json"),
            66,
            "too long",
        )


def test_conjugate_views_are_saved_numbers_like_any_other(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1 + 2j]).conj()}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt").state["w"].item() == 1 - 2j


def test_features_too_small_for_a_square_are_fitted(cli: Cli, tmp_path: Path) -> None:
    features = np.full((12, 4), 1e-45, np.float32)
    np.savez(
        tmp_path / "f.npz",
        features_train=features,
        labels_train=np.arange(12) % 3,
        head_weight=np.ones((3, 4), np.float32),
    )
    assert cli("extract-features", tmp_path / "run", "--from-npz", tmp_path / "f.npz").code == 0
    assert cli("fit-laplace", tmp_path / "run", "--prior-precision", 1).code == 0


def test_a_file_is_run_as_it_stands_whatever_python_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "as_it_stands.py"
    for answer in (1, 2):
        path.write_text(f"def make():\n    return {answer}\n")
        os.utime(path, (1e9, 1e9))  # as where both were written within a second
        assert load_factory(f"{path}:make", option="model")() == answer
    del sys.modules["as_it_stands"]


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
