"""Data that were opened before: the same is told of them without opening them, as long as every byte is the same."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from problems.transforms import WordLengths

from bnncli.artifacts.features import DataFacts
from bnncli.data.kinds import csv, jsonl, webdataset
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit, hold_out, load_split

pytestmark = [pytest.mark.core, pytest.mark.libraries]

TEXTS = ["a b", "c", "d e f", "g"]
LABELS = ["no", "yes", "maybe", "no"]


def write(kind: str, path: Path) -> str:
    if kind == "csv":
        path.write_text(
            "text,label\n" + "".join(f"{text},{label}\n" for text, label in zip(TEXTS, LABELS, strict=True))
        )
    elif kind == "jsonl":
        path.write_text("".join(f'{{"text": "{text}", "labels": [1, {row % 2}]}}\n' for row, text in enumerate(TEXTS)))
    else:
        with tarfile.open(path, "w") as archive:
            for row, pair in enumerate(zip(TEXTS, LABELS, strict=True)):
                for suffix, text in zip(("txt", "cls"), pair, strict=True):
                    info = tarfile.TarInfo(f"{row}.{suffix}")
                    info.size = len(text)
                    archive.addfile(info, io.BytesIO(text.encode()))
    return f"{kind}:{path}"


def load(spec: str, memory: DataFacts | None = None) -> InputSplit:
    preprocess = Preprocess(transform=WordLengths())
    return load_split(spec, name="train", preprocess=preprocess, takes_any_labels=True, memory=memory)


def told(split: InputSplit) -> Mapping[str, object]:
    labels = np.asarray(split.labels).tolist()
    facts = (split.order_digest, labels, split.classes, split.names, len(split), split.dataset.items, split.num_labels)
    held = hold_out({"train": split}, "val=train:2", seed=3)["val"].order_digest
    return dict(enumerate((*facts, held)))


@pytest.mark.parametrize("module", [csv, jsonl, webdataset])
def test_what_is_known_is_told_without_opening(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(module.__name__.rpartition(".")[2], tmp_path / "data")
    plain, memory = load(spec), DataFacts(tmp_path / "train.h5")
    assert told(load(spec, memory)) == told(plain)
    memory.keep()
    opened, open_dataset = [], module.open_dataset
    monkeypatch.setattr(module, "open_dataset", lambda *words: opened.append(words) or open_dataset(*words))
    known = load(spec, DataFacts(tmp_path / "train.h5"))
    assert told(known) == told(plain)
    assert not opened
    assert known.dataset.read(known.rows[1:])[0] == TEXTS[1:]
    for one, other in zip(known.batches(3), plain.batches(3), strict=True):
        assert repr(one) == repr(other)


def test_what_is_known_is_of_the_same_bytes_alone(tmp_path: Path) -> None:
    spec, memory = write("csv", tmp_path / "data"), DataFacts(tmp_path / "train.h5")
    load(spec, memory)
    memory.keep()
    before = os.stat(tmp_path / "data")
    (tmp_path / "data").write_text((tmp_path / "data").read_text().replace("yes", "YES"))
    os.utime(tmp_path / "data", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(spec, memory).classes == ("YES", "maybe", "no")
    assert load(f"{spec}:text=label,label=", memory).labels is None


@pytest.mark.parametrize("damage", [b"", b"PK", None])
def test_damage_of_what_is_known_is_not_missed(damage: bytes | None, tmp_path: Path) -> None:
    spec, memory = write("csv", tmp_path / "data"), DataFacts(tmp_path / "train.h5")
    load(spec, memory)
    memory.keep()
    kept = tmp_path / ".train.data.npz"
    kept.write_bytes(kept.read_bytes()[:-30] if damage is None else damage)
    assert told(load(spec, memory)) == told(load(spec))
