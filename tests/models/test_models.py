"""Saved models by name: what is one, which options it takes, and what is said where its library is missing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bnncli.artifacts.headers import odd_field
from bnncli.errors import UsageError
from bnncli.models import is_kind
from bnncli.models.libraries import part, require
from bnncli.session.run import ModelFiles, own_files


@pytest.mark.parametrize("spec", ["mlp", "net.py:make", "package.module:make", "hf", "no-such-kind:x", ""])
def test_what_is_no_kind_of_model_stays_what_it_is(spec: str) -> None:
    assert not is_kind(spec)


def test_a_missing_library_is_one_line_with_what_installs_it() -> None:
    with pytest.raises(UsageError, match=r"^\0model\0 hf needs no_such_library, which is not installed$") as told:
        require("no_such_library.part", extra="hf")
    assert told.value.hint == "pip install 'bnncli[hf]'"
    with pytest.raises(UsageError, match=r"^\0model\0 sklearn needs no_such_library"):
        require("no_such_library", extra="sklearn-skops", kind="sklearn")


def test_a_library_that_fails_to_import_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halved_library.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"halved_library, which cannot be imported: RuntimeError: two lines$"):
        require("halved_library", extra="hf")


def test_the_digest_of_files_is_of_their_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    places = [tmp_path / "b.json", tmp_path / "sub/a.bin"]
    for place in places:
        place.write_text(place.name)
    files = ModelFiles.of(places)
    assert (files.folder, files.names) == (tmp_path, ("b.json", "sub/a.bin"))
    digests = {files.sha256(), files.sha256()}
    assert len(digests) == 1
    places[0].write_text("other.")  # of the same size
    digests.add(files.sha256())
    places[0].write_text("b.json")
    assert files.sha256() in digests
    places[0].rename(tmp_path / "c.json")
    digests.add(ModelFiles.of([tmp_path / "c.json", places[1]]).sha256())
    assert len(digests) == 3


def test_files_are_recorded_relative_to_the_run_folders_parent(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    files = ModelFiles.of([tmp_path / "model/config.json"])
    record = files.to_json(tmp_path / "reviews.bnn")
    assert record == {"path": "model", "files": ["config.json"]}
    assert ModelFiles.recorded(record, tmp_path / "reviews.bnn") == files
    assert ModelFiles.recorded({"path": "net.pt"}, tmp_path / "net.pt.bnn") is None
    forged = {**record, "file_sha256": "0", "weights_digest": "0", "files": "config.json"}
    provenance = {"params_hash": "", "params": {}, "algo_rev": 1, "command": [], "inputs": [], "checkpoint": forged}
    assert odd_field("features", provenance, {}) == "checkpoint"
    provenance["checkpoint"] = {**forged, "files": ["config.json"]}
    assert odd_field("features", provenance, {}) is None


@pytest.mark.parametrize("name", ["model.safetensors", "step/__0_0.distcp", "model-00001-of-00002.bin"])
def test_a_folder_of_other_weights_is_no_name_of_a_run(tmp_path: Path, name: str) -> None:
    own, other = tmp_path / "model/model.safetensors", tmp_path / "other" / name
    for place in (own, other):
        place.parent.mkdir(parents=True)
        place.touch()
    (tmp_path / "linked").symlink_to(own.parent)
    (tmp_path / "reviews").mkdir()
    saved: Any = SimpleNamespace(files=(own,))
    assert own_files(saved, other.parent) is None
    assert [own_files(saved, tmp_path / name) for name in ("model", "linked", "reviews", "absent")] == [
        ModelFiles.of([own])
    ] * 4


def test_a_library_whose_own_libraries_are_broken_is_one_line() -> None:
    """As transformers beside a torchvision for another torch: what it is asked for is imported late, and fails there."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            if name == "Absent":
                raise AttributeError(name)
            try:
                raise RuntimeError("operator torchvision::nms does not exist")
            except RuntimeError as error:
                raise ModuleNotFoundError(f"Could not import module {name!r}") from error

    assert part(Lazy("transformers"), "Absent", extra="hf") is None
    with pytest.raises(
        UsageError, match=r"^transformers cannot import Bert: RuntimeError: operator torchvision::nms"
    ) as found:
        part(Lazy("transformers"), "Bert", extra="hf")
    assert found.value.hint is not None
    assert "bnncli[hf]" in found.value.hint
