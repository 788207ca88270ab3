"""Shards of tar files, against the library that defines the format and against plain arrays."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from problems.transforms import Halved, WordLengths

from bnncli.data.pixels import Preprocess
from bnncli.data.splits import load_split
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted, UsageError

pytestmark = [pytest.mark.core, pytest.mark.libraries]

RNG = np.random.default_rng(5)
PIXELS = RNG.integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def npy(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def write_shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_a_pattern_takes_shards_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 100):
        write_shard(tmp_path / f"part-{number}.tar", {f"{number}.png": png(PIXELS[0]), f"{number}.cls": b"0"})
    assert load_split(f"webdataset:{tmp_path}/part-*.tar").names == ["9", "10", "100"]


@pytest.mark.parametrize("written", [[True, False], [[1, 0, 1], [0, 1, 1]]])
def test_json_may_hold_truth_values_and_several_labels(tmp_path: Path, written: list[Any]) -> None:
    members = {f"{row}.png": png(PIXELS[row]) for row in range(2)}
    members |= {f"{row}.json": json.dumps({"label": value}).encode() for row, value in enumerate(written)}
    split = load_split(f"webdataset:{write_shard(tmp_path / 'a.tar', dict(sorted(members.items())))}")
    assert np.array_equal(np.asarray(split.labels), np.array(written))


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Three shards of four images each, with a number and a JSON object for each of them."""
    for shard in range(3):
        members: dict[str, bytes] = {"__index__": b"{}"}
        for row in range(4 * shard, 4 * shard + 4):
            fields = {"label": ["dog", "cat"][row % 2], "caption": f"no. {row}"}
            members |= {f"a.b/{row:03}.png": png(PIXELS[row]), f"a.b/{row:03}.cls": f"{row % 3}\n".encode()}
            members[f"a.b/{row:03}.JSON"] = json.dumps(fields).encode()
        write_shard(tmp_path / f"part-{shard:04}.tar", members)
    return f"webdataset:{tmp_path}/part-{{0000..0002}}.tar"


def test_images_and_labels_come_in_the_order_of_the_shards(shards: str) -> None:
    split = load_split(shards)
    rows = np.array([11, 0, 5, 4, 3])
    images, labels = split.dataset.read(rows)
    assert np.array_equal(images, PIXELS[rows])
    assert labels.tolist() == (rows % 3).tolist() == split.labels[rows].tolist()
    assert split.names[4] == "a.b/004"


def test_columns_can_be_named_and_names_are_numbered_in_their_order(shards: str) -> None:
    split = load_split(f"{shards}:image=png,label=json.label@5")
    assert (split.classes, split.labels.tolist()) == (("cat", "dog"), [1, 0, 1, 0, 1])
    texts = load_split(f"{shards}:text=json.caption,label=cls", preprocess=Preprocess(transform=WordLengths()))
    assert texts.dataset.read(np.array([7, 2]))[0] == ["no. 7", "no. 2"]


def test_batches_of_another_process_are_those_of_this_one(shards: str) -> None:
    split = load_split(shards, preprocess=Preprocess(resize=4, crop=4, mean=(0.5,)))
    here, there = ([batch.inputs for batch in split.batches(5, num_workers=workers)] for workers in (0, 1))
    assert all(one.equal(other) for one, other in zip(here, there, strict=True))
    assert here[0].shape == (5, 3, 4, 4)


def test_a_models_transform_gets_images_and_texts_as_they_are(shards: str, tmp_path: Path) -> None:
    split = load_split(shards, preprocess=Preprocess(transform=Halved()))
    assert np.array_equal(np.stack([np.array(image) for image in split.dataset.read(np.arange(12))[0]]), PIXELS)
    write_shard(tmp_path / "t.tar", {"0.txt": "é".encode(), "0.jpg": b"", "1.txt": b"", "1.jpg": b""})
    texts = load_split(f"webdataset:{tmp_path}/t.tar", preprocess=Preprocess(transform=WordLengths()))
    assert texts.dataset.read(np.arange(2)) == (["é", ""], None)


def test_texts_for_a_model_of_images_are_refused_with_the_column_to_name(shards: str) -> None:
    with pytest.raises(UsageError, match="the data are texts, but the model takes images") as error:
        load_split(f"{shards}:text=json.caption", preprocess=Preprocess(transform=Halved()))
    assert error.value.hint == "name the column: image=COLUMN"


def test_the_digest_is_of_the_content_and_of_the_columns(shards: str, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in sorted(tmp_path.glob("*.tar")):
        (moved / path.name).write_bytes(path.read_bytes())
    split, glob = load_split(shards), load_split(f"webdataset:{moved}/*.tar")
    assert split.content_digest() == glob.content_digest()
    assert split.content_digest() != load_split(f"{shards}:label=json.label").content_digest()
    changed = bytearray((moved / "part-0001.tar").read_bytes())
    changed[1600] ^= 1
    (moved / "part-0001.tar").write_bytes(changed)
    assert split.content_digest() != load_split(f"webdataset:{moved}/*.tar").content_digest()


def test_arrays_are_read_and_pickles_in_them_are_not(tmp_path: Path) -> None:
    arrays = RNG.normal(size=(3, 4)).astype(">f4")
    members = {
        f"{row}.{suffix}": data for row in range(3) for suffix, data in (("npy", npy(arrays[row])), ("cls", b"1"))
    }
    split = load_split(f"webdataset:{write_shard(tmp_path / 'a.tar', members)}")
    assert np.array_equal(split.dataset.read(np.arange(3))[0], arrays)
    objects = npy(np.array([{}], object), allow_pickle=True)
    bad = load_split(f"webdataset:{write_shard(tmp_path / 'b.tar', {**members, '2.npy': objects})}")
    with pytest.raises(Untrusted, match=r"b.tar': the x of '2' holds Python objects"):
        list(bad.batches(3))


def test_the_library_reads_the_same_examples(shards: str) -> None:
    library = pytest.importorskip("webdataset")
    theirs = list(library.WebDataset(shards.partition(":")[2], shardshuffle=False, empty_check=False))
    split = load_split(shards)
    images, labels = split.dataset.read(np.arange(len(split)))
    assert [one["__key__"] for one in theirs] == split.names
    assert [int(one["cls"]) for one in theirs] == labels.tolist()
    assert all(
        np.array_equal(Image.open(io.BytesIO(one["png"])), image) for one, image in zip(theirs, images, strict=True)
    )


def test_patterns_name_ranges_choices_and_globs(shards: str, tmp_path: Path) -> None:
    place = f"webdataset:{tmp_path}/part-000"
    assert len(load_split(f"{place}{{0,2}}.tar")) == len(load_split(f"{place}[02].tar")) == 8
    assert load_split(f"{place}{{2..0}}.tar").names[0] == "a.b/008"
    (tmp_path / "odd{0..1}.tar").write_bytes((tmp_path / "part-0000.tar").read_bytes())
    assert len(load_split(f"webdataset:{tmp_path}/odd{{0..1}}.tar")) == 4


@pytest.mark.parametrize(
    ("spec", "kind", "told"),
    [
        ("part-{0000..0003}.tar", MissingInput, r"no file '.*part-0003.tar'"),
        ("none-*.tar", MissingInput, r"no file matches '.*none-\*.tar'"),
        ("part-0000.tar:label=json.colour", DataError, r"the label of 'a.b/000' has no field 'colour'"),
        ("part-0000.tar:label=txt", UsageError, r"example 'a.b/000' has no 'txt'; it has 'png', 'cls', 'json'"),
        ("part-0000.tar:x=cls,image=png", UsageError, "with only one of"),
        ("part-0000.tar:pixels=png", UsageError, "expected columns such as text=COL,label=COL"),
    ],
)
def test_what_is_not_there_is_told(spec: str, kind: type[BnnError], told: str, shards: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=told) as error:
        load_split(f"webdataset:{tmp_path}/{spec}")
    assert "\n" not in error.value.message


def test_shards_on_the_network_are_refused() -> None:
    with pytest.raises(UsageError, match="not an address on the network"):
        load_split("webdataset:https://example.org/{0..3}.tar")


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"0.png": b"", "0.cls": b"0", "1.png": b""}, r"the label of '1' \(cls\) is missing; the example has 'png'"),
        ({"0.png": b"", "0.cls": b"0", "1.cls": b"0"}, r"the image of '1' .*is missing; the example has 'cls'"),
        ({"0.png": b"", "0.cls": b"cat", "1.png": b"", "1.cls": b"2"}, "all integers from 0 or all names; row 0 has 'cat', row 1 has 2"),
        ({"0.png": b"", "0.cls": b"-1", "1.png": b"", "1.cls": b"0"}, "row 0 has -1"),
        ({"0.png": b"", "0.PNG": b""}, r"has two files named '0.PNG'"),
        ({"0.png": b"", "1.png": b"", "0.cls": b"0"}, r"has the key '0' twice"),
        ({"0.png": b"", "0.cls": b"9" * 5000}, "row 0 has a number with 5000 digits"),
        ({"README": b"no example"}, "no examples"),
    ],
)  # fmt: skip
def test_examples_that_lack_something_are_told(members: dict[str, bytes], told: str, tmp_path: Path) -> None:
    image = png(PIXELS[0])
    members = {name: image if name.lower().endswith("png") else data for name, data in members.items()}
    with pytest.raises(DataError, match=told):
        load_split(f"webdataset:{write_shard(tmp_path / 'a.tar', members)}")


def test_several_possible_inputs_are_listed(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", {"0.png": b"", "0.txt": b"a", "0.cls": b"0"})
    with pytest.raises(UsageError, match="several could be the input: 'png', 'txt'"):
        load_split(f"webdataset:{path}")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:2700], r"unexpected end of data after 'a.b/000.cls'"),
        (lambda data: data[:2048] + b"?" * 512 + data[2560:], r"a header is damaged after 'a.b/000.png'"),
        (lambda data: data[:1024], r"it is truncated after '__index__'"),
        (lambda data: b"x" * 2000, "is not a complete tar file"),
        (lambda data: b"", "is not a complete tar file"),
        (lambda data: b"\x1f\x8b" + data, r"is compressed \(gzip\)"),
    ],
)
def test_a_damaged_shard_is_told_with_the_file_before_the_damage(
    damage: Any, told: str, shards: str, tmp_path: Path
) -> None:
    path = tmp_path / "part-0001.tar"
    data = (tmp_path / "part-0000.tar").read_bytes()
    path.write_bytes(damage(data))
    with pytest.raises(DataError, match=f"part-0001.tar' .*{told}"):
        load_split(shards)


def test_an_image_that_cannot_be_decoded_is_told_with_its_shard(tmp_path: Path) -> None:
    image = png(PIXELS[0])
    path = write_shard(tmp_path / "a.tar", {"0.png": image, "1.png": image[:60], "2.png": png(PIXELS[1][:3])})
    split = load_split(f"webdataset:{path}")
    with pytest.raises(DataError, match=r"cannot decode '.*a.tar': the image of '1'"):
        split.dataset.read(np.array([0, 1]))
    with pytest.raises(DataError, match=re.escape("images have different sizes: '2' is 3 x 5, '0' is 6 x 5")):
        split.dataset.read(np.array([0, 2]))
