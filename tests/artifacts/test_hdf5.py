"""HDF5 artifacts: written whole, refused when they hold anything our writer never makes."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from bnncli.artifacts import hdf5
from bnncli.artifacts import hdf5 as hdf5_objects
from bnncli.artifacts.hdf5 import MARK, check_digest, header_of, make_seal, open_hdf5, read_contents, write_hdf5
from bnncli.artifacts.provenance import build_provenance
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted

pytestmark = pytest.mark.core

ARRAYS = {"group/a": np.arange(30_000, dtype=np.float32).reshape(-1, 3), "b": np.array([1, 2], dtype=np.int64)}
TEXTS: dict[str, str | list[str]] = {"names": ["null", "één"], "note": '{"a":1}'}


def write(path: Path, *, may_replace: bool = False, warnings: tuple[str, ...] = ()) -> str:
    provenance = build_provenance(
        path, command=["bnncli"], params={}, algo_rev=1, inputs=[], checkpoint=None,
        environment={}, seconds=0.0, warnings=warnings,
    )  # fmt: skip
    meta = {"num": 2}
    return write_hdf5(path, ARRAYS, TEXTS, kind="features", meta=meta, provenance=provenance, may_replace=may_replace)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "a.h5")
    return tmp_path / "a.h5"


def reseal(path: Path) -> None:
    """A new seal for a file that was changed: what an attacker would do."""
    content = path.read_bytes()
    path.write_bytes(content + make_seal(io.BytesIO(content), []))


def read_all(path: Path) -> None:
    with open_hdf5(path) as file:
        header = header_of(path, file)
        arrays, texts = read_contents(path, file)
    check_digest(path, header, arrays, texts)


@pytest.mark.parametrize("limit", [1 << 30, 0], ids=["in memory", "on disk"])
def test_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(hdf5, "IN_MEMORY_LIMIT", limit)
    digest = write(tmp_path / "a.h5")
    with open_hdf5(tmp_path / "a.h5") as file:
        header = header_of(tmp_path / "a.h5", file)
        arrays, texts = read_contents(tmp_path / "a.h5", file)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }
    assert texts == TEXTS
    assert (header.kind, header.meta, header.content_digest) == ("features", {"num": 2}, digest)


def test_both_ways_of_writing_give_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write(tmp_path / "small.h5")
    monkeypatch.setattr(hdf5, "IN_MEMORY_LIMIT", 0)
    monkeypatch.setattr(hdf5, "BLOCK_BYTES", 1000)
    assert write(tmp_path / "large.h5") == small
    read_all(tmp_path / "large.h5")


def test_arrays_are_contiguous_and_can_be_found_by_anybody(path: Path) -> None:
    with h5py.File(path, "r", locking=False) as file:
        dataset = file["group/a"]
        assert dataset.chunks is None
        start = dataset.id.get_offset()
    values = np.frombuffer(path.read_bytes(), "<f4", count=90_000 // 3, offset=start)
    assert np.array_equal(values, ARRAYS["group/a"].ravel())


def test_provenance_does_not_change_the_content_digest(tmp_path: Path) -> None:
    assert write(tmp_path / "a.h5") == write(tmp_path / "b.h5", warnings=("slow",))
    assert (tmp_path / "a.h5").read_bytes() != (tmp_path / "b.h5").read_bytes()


def test_a_file_that_opens_but_was_never_finished_is_refused(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file.attrs["bnncli_complete"]
    reseal(path)
    with pytest.raises(DataError, match="incomplete"):
        read_all(path)


def external_link(file: h5py.File, secret: Path) -> None:
    del file["b"]
    file["b"] = h5py.ExternalLink(str(secret), "x")


def soft_link(file: h5py.File, secret: Path) -> None:
    file["link"] = h5py.SoftLink("/b")


def link_in_the_middle(file: h5py.File, secret: Path) -> None:
    file.move("group", "hidden")
    file["group"] = h5py.SoftLink("/hidden")


def external_storage(file: h5py.File, secret: Path) -> None:
    del file["b"]
    file.create_dataset("b", (8,), "u1", external=[(str(secret), 0, 8)])


def virtual_dataset(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((4,), "i8")
    layout[:] = h5py.VirtualSource(str(secret), "x", (4,))
    file.create_virtual_dataset("group/virtual", layout)


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("attack", [external_link, soft_link, link_in_the_middle, external_storage, virtual_dataset])
def test_links_to_other_files_refused(path: Path, attack: Callable[[h5py.File, Path], None], is_sealed: bool) -> None:
    secret = path.with_name("secret.h5")
    with h5py.File(secret, "w") as file:
        file["x"] = np.arange(4)
    with h5py.File(path, "r+") as file:
        attack(file, secret)
    if is_sealed:
        reseal(path)
    with pytest.raises(Untrusted, match=r"is a link|another file") as caught:
        read_all(path)
    assert caught.value.exit == 77


def declares_more_than_is_stored(file: h5py.File) -> None:
    file.create_dataset("huge", (10**11,), "f8")


def declares_much_in_total(file: h5py.File) -> None:
    for number in range(5):
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.CONTIGUOUS)
        space = h5py.h5s.create_simple((10**6,))
        h5py.h5d.create(file.id, f"x{number}".encode(), h5py.h5t.NATIVE_DOUBLE, space, dcpl=properties)


def is_compressed(file: h5py.File) -> None:
    file.create_dataset("bomb", data=np.zeros(10**6), compression="gzip", chunks=(10**6,))


def has_a_loop(file: h5py.File) -> None:
    file["group/again"] = file["/"]


def has_pickled_objects(file: h5py.File) -> None:
    file.create_dataset("objects", (2,), h5py.vlen_dtype(np.uint8))


def has_an_array_without_shape(file: h5py.File) -> None:
    file["nothing"] = h5py.Empty("f8")


def has_a_committed_type(file: h5py.File) -> None:
    file["type"] = np.dtype("f8")


def has_long_text(file: h5py.File) -> None:
    file.create_dataset("text", (10,), "S1000000")


def has_a_list_of_marks(file: h5py.File) -> None:
    file.attrs["bnncli_complete"] = [1, 1]


def has_no_provenance(file: h5py.File) -> None:
    del file["provenance"]


@pytest.mark.parametrize(
    "attack",
    [
        declares_more_than_is_stored, declares_much_in_total, is_compressed, has_a_loop, has_pickled_objects,
        has_an_array_without_shape, has_a_committed_type, has_long_text, has_a_list_of_marks, has_no_provenance,
    ],
)  # fmt: skip
def test_a_file_that_our_writer_never_makes_is_refused(path: Path, attack: Callable[[h5py.File], None]) -> None:
    with h5py.File(path, "r+") as file:
        attack(file)
    reseal(path)
    with pytest.raises(DataError) as caught:
        read_all(path)
    assert caught.value.exit == 65
    assert caught.value.code != "digest_mismatch"  # refused for its form, before its data were read


def test_groups_that_form_a_loop_are_named(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        has_a_loop(file)
    reseal(path)
    with pytest.raises(DataError, match="form a cycle"):
        read_all(path)


def test_a_file_without_its_seal_is_refused_although_all_its_content_is_there(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(MARK)])
    with pytest.raises(DataError, match="incomplete"):
        read_all(path)


def test_a_million_small_groups_are_refused_early(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5_objects, "MAX_OBJECTS", 10)
    with h5py.File(path, "r+") as file:
        for number in range(20):
            file.create_group(f"g{number}")
    reseal(path)
    with pytest.raises(DataError, match="more than 10 objects"):
        read_all(path)


def test_a_missing_file_and_a_pipe_are_missing_inputs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("none", "does not exist"), ("pipe", "not a regular file")):
        with pytest.raises(MissingInput, match=why):
            read_all(tmp_path / name)


def test_full_disk_under_a_large_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("this process may not mount a file system")
    monkeypatch.setattr(hdf5, "IN_MEMORY_LIMIT", 0)
    try:
        with pytest.raises(BnnError, match="No space left") as caught:
            write(tmp_path / "a.h5")
        assert caught.value.exit == 74
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
