"""extract-features, interrupted and continued: the same features, to the bit, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, Invocation
from torch import nn

from bnncli.artifacts import resume
from bnncli.artifacts.features import CHECK_ROWS, read_features
from bnncli.artifacts.files import read_header
from bnncli.errors import Interrupted, WriteError
from bnncli.session.network import FeatureStore

NETWORK = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))\n"
DATA = """
import numpy as np
class Data:
    def __len__(self):
        return 700
    def __getitem__(self, row):
        return np.sin(np.arange(4, dtype="f4") + row), row % 3
"""
SPLITS = ("train", "test")
Extract = Callable[..., Invocation]
Cut = Callable[[int], None]


@pytest.fixture
def extract(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extract:
    """Runs extract-features on two splits, of arrays and of a Dataset whose labels are known when they are read."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    Path("data.py").write_text(DATA)
    rng = np.random.default_rng(1)
    np.savez("train.npz", x=rng.normal(size=(900, 4)).astype("f4"), y=rng.integers(3, size=900))
    torch.manual_seed(1)
    torch.save(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).state_dict(), "net.pt")
    data = ("--data", "train=npz:train.npz", "--data", "test=py:data.py:Data")
    return lambda *words: cli(
        "extract-features", "net.pt", "--model", "net.py:make", *data, "--batch-size", 100, *words
    )


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Interrupts the next command after so many batches, as a signal does."""
    plain, left = FeatureStore._add, [-1]

    def add(self: FeatureStore, batch: object) -> None:
        if left[0] == 0:
            left[0] = -1
            raise Interrupted(15, "interrupted")
        left[0] -= 1
        plain(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(FeatureStore, "_add", add)
    return lambda batches: left.__setitem__(0, batches)


def digests(folder: Path = Path("net.pt.bnn")) -> list[str]:
    return [read_features(folder / "features" / f"{name}.h5").header.content_digest for name in SPLITS]  # type: ignore[union-attr]


def statistics(folder: Path = Path("net.pt.bnn")) -> list[object]:
    headers = [read_header(folder / "features" / f"{name}.h5") for name in SPLITS]
    return [header.provenance["input_statistics"] for header in headers]


def left_behind(folder: Path = Path("net.pt.bnn")) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*") if path.is_file() and not path.name.endswith(".lock"))


@pytest.mark.parametrize("words", [(), ("--dtype", "float16")])
def test_a_run_continues_to_the_same_bytes_wherever_it_was_interrupted(
    extract: Extract, cut: Cut, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...]
) -> None:
    assert extract(*words, "--run-dir", "whole.bnn").code == 0
    assert left_behind(Path("whole.bnn")) == []
    saving = (*words, "--save-every", 0)
    for batches, told in ((5, "nothing to resume"), (2, "resuming after 500 rows of train"), (4, "after 700 rows")):
        cut(batches)
        found = extract(*saving, "--resume")
        assert (found.code, "--resume" in found.stderr.splitlines()[-1]) == (143, True), found.stderr
        assert told in found.stderr
        assert left_behind()
    done = extract(*saving, "--resume")
    assert (done.code, left_behind()) == (0, []), done.stderr
    assert "resuming after 900 rows of train" in done.stderr
    assert "resuming after 200 rows of test" in done.stderr
    assert digests() == digests(Path("whole.bnn"))
    assert statistics() == statistics(Path("whole.bnn"))


def test_what_is_many_goes_through_a_file_and_is_the_same(extract: Extract, monkeypatch: pytest.MonkeyPatch) -> None:
    assert extract("--run-dir", "whole.bnn").code == 0
    init, taken = resume.RecordFile.__init__, []

    def small(self: resume.RecordFile, *args: object, **options: object) -> None:
        init(self, *args, **{**options, "buffer_bytes": 1000})  # type: ignore[arg-type]

    monkeypatch.setattr(resume.RecordFile, "__init__", small)
    collect = FeatureStore.collect
    monkeypatch.setattr(
        FeatureStore, "collect", lambda self, batches: taken.append(found := collect(self, batches)) or found
    )
    assert extract().code == 0
    assert digests() == digests(Path("whole.bnn"))
    assert [type(found.features.numpy().base) for found in taken] != [None, None]
    assert left_behind() == []


def test_a_short_run_keeps_nothing_when_it_is_interrupted_without_a_state(extract: Extract, cut: Cut) -> None:
    cut(0)
    assert extract().code == 143
    assert left_behind() == []


def test_only_the_same_request_is_continued(extract: Extract, cut: Cut) -> None:
    cut(3)
    extract("--save-every", 0)
    assert left_behind() == [".train.resume.rows", ".train.resume.safetensors"]
    for words, why in (
        (("--dtype", "float16"), "other options"),
        (("--batch-size", 50), "another batch size"),
        (("--seed", 5), "another seed"),
    ):
        refused = extract(*words, "--resume")
        assert refused.code == 65
        assert why in refused.stderr
    np.savez("train.npz", x=np.ones((900, 4), "f4"), y=np.zeros(900, int))
    refused = extract("--resume")
    assert (refused.code, "another data.train" in refused.stderr) == (65, True)
    afresh = extract()
    assert (afresh.code, left_behind()) == (0, []), afresh.stderr


@pytest.mark.parametrize("harm", ["gone", "short", "changed"])
def test_features_that_were_harmed_meanwhile_are_not_continued(extract: Extract, cut: Cut, harm: str) -> None:
    cut(3)
    extract("--save-every", 0)
    rows = Path("net.pt.bnn/features/.train.resume.rows")
    content = bytearray(rows.read_bytes())
    content[70] ^= 1
    if harm == "gone":
        rows.unlink()
    else:
        rows.write_bytes(content[:-1] if harm == "short" else content)
    refused = extract("--resume")
    assert refused.code == 65
    assert {"gone": "are missing", "short": "truncated", "changed": "damaged"}[harm] in refused.stderr
    assert "rm " in refused.stderr


def test_a_full_disk_leaves_what_the_next_run_continues_from(extract: Extract, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, left = FeatureStore._state, [3]

    def full(self: FeatureStore) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise WriteError("no space left")
        return plain(self)

    monkeypatch.setattr(FeatureStore, "_state", full)
    failed = extract("--save-every", 0)
    assert (failed.code, "--resume" in failed.stderr) == (74, True)
    monkeypatch.setattr(FeatureStore, "_state", plain)
    done = extract("--resume")
    assert done.code == 0
    assert "resuming after 200 rows of train" in done.stderr


def test_logits_are_kept_of_the_rows_that_the_file_has_them_of(
    extract: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    collect = FeatureStore.collect
    monkeypatch.setattr(
        FeatureStore, "collect", lambda self, batches: found.append(one := collect(self, batches)) or one
    )
    assert extract().code == 0
    assert [len(one.logits) for one in found] == [CHECK_ROWS] * 2
