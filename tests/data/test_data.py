"""Data sets: arrays, images, classes, shifts, and their loaders."""

from __future__ import annotations

import gzip
import io
import mmap
import multiprocessing
import os
import re
import signal
import struct
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import loadmat, savemat
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from bnncli.data import arrays
from bnncli.data.arrays import read_feature_arrays, read_mat, read_npz
from bnncli.data.labels import match_classes
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit, hold_out, hold_out_rows, load_split, parse_split
from bnncli.errors import BnnError, DataError, DeviceError, MissingInput, Untrusted, UsageError

pytestmark = [pytest.mark.core, pytest.mark.libraries]


RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (12, 5, 4), dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (12, 5, 4, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def write_npz(path: Path, **arrays: Any) -> str:
    np.savez_compressed(path, **arrays)
    return f"npz:{path}"


def inputs_of(split: InputSplit, batch_size: int = 5, **options: Any) -> torch.Tensor:
    return torch.cat([batch.inputs for batch in split.batches(batch_size, **options)])


def labels_of(split: InputSplit) -> list[int]:
    batches = [batch.labels for batch in split.batches(5)]
    return [int(label) for labels in batches if labels is not None for label in labels]


STORED = {
    "grey": (GREY, GREY[:, None] / 255),
    "channels last": (COLOUR, COLOUR.transpose(0, 3, 1, 2) / 255),
    "channels first": (COLOUR.transpose(0, 3, 1, 2).copy(), COLOUR.transpose(0, 3, 1, 2) / 255),
    "rows": (GREY.reshape(12, 20), GREY.reshape(12, 20) / 255),
    "float": (GREY.astype(np.float64), GREY.astype(np.float64)),
    "big-endian float16": (GREY.astype(">f2"), GREY.astype(np.float64)),
}


@pytest.mark.parametrize("kind", STORED)
def test_stored_inputs_become_what_the_network_takes(tmp_path: Path, kind: str) -> None:
    stored, expected = STORED[kind]
    split = load_split(write_npz(tmp_path / "a.npz", x=stored, y=LABELS))
    inputs = inputs_of(split)
    assert inputs.dtype == torch.float32
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-6)
    assert labels_of(split) == LABELS.tolist()


def test_mean_and_std_normalise_each_channel(tmp_path: Path) -> None:
    preprocess = Preprocess.parse(mean="0.1,0.2,0.3", std="0.5,0.6,0.7")
    inputs = inputs_of(load_split(write_npz(tmp_path / "a.npz", x=COLOUR), preprocess=preprocess))
    expected = (COLOUR / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    np.testing.assert_allclose(inputs.numpy(), expected.transpose(0, 3, 1, 2), rtol=1e-5, atol=1e-6)


def test_resize_and_crop_of_arrays_agree_with_pillow() -> None:
    image = Image.fromarray(RANDOM.integers(0, 256, (40, 60, 3), dtype=np.uint8))
    expected = np.array(image.resize((30, 20), Image.Resampling.BILINEAR).crop((7, 2, 23, 18)))
    inputs = Preprocess(resize=20, crop=16).apply(torch.from_numpy(np.array(image))[None])
    # Pillow rounds to 8 bits after each of its two passes.
    np.testing.assert_allclose(inputs[0].numpy().transpose(1, 2, 0) * 255, expected, atol=1.01)


def test_neither_workers_nor_batch_size_change_the_batches(tmp_path: Path) -> None:
    split = load_split(write_npz(tmp_path / "a.npz", x=GREY, y=LABELS))
    whole = inputs_of(split, 12)
    assert torch.equal(inputs_of(split, 5), whole)
    assert torch.equal(inputs_of(split, 5, num_workers=2), whole)


PREPROCESS_ERRORS = {
    (("mean", "x"),): "\0mean\0: expected numbers such as",
    (("mean", "1,2"), ("std", "1")): "\0mean\0 has 2 values, but \0std\0 has 1",
    (("std", "0"),): "\0std\0: expected numbers above 0",
}


@pytest.mark.parametrize(("options", "message"), PREPROCESS_ERRORS.items())
def test_impossible_normalisation_is_a_usage_error(options: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Preprocess.parse(**dict(options))  # type: ignore[arg-type]


def test_normalisation_for_other_channels_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"\0mean\0 has 3 values, but the inputs have shape \(12, 1, 5, 4\)"):
        Preprocess(mean=(0.1, 0.2, 0.3)).apply(torch.from_numpy(GREY))


def test_a_crop_beyond_the_image_is_refused() -> None:
    with pytest.raises(DataError, match="the image is only 5 x 4"):
        Preprocess(crop=6).apply(torch.from_numpy(GREY))


def test_images_with_an_odd_number_of_channels_are_refused() -> None:
    with pytest.raises(DataError, match=r"1, 3 or 4 channels, got \(2, 5, 7, 6\)"):
        Preprocess().apply(torch.zeros(2, 5, 7, 6, dtype=torch.uint8))


def test_the_arrays_of_an_npz_file_are_chosen_by_name(tmp_path: Path) -> None:
    spec = write_npz(tmp_path / "a.npz", images=GREY, labels=LABELS, y=LABELS + 1)
    assert labels_of(load_split(f"{spec}:images,labels")) == LABELS.tolist()
    assert labels_of(load_split(f"{spec}:images,y@4")) == [1, 2, 3, 1]
    assert not load_split(f"{spec}:images").is_labeled


@pytest.mark.parametrize("name", ["a b.npz", "a:x,y.npz", "a:x", "mail@host.npz", "x@3", "a,b.npz", "ü'\".npz"])
def test_odd_file_names_are_found(tmp_path: Path, name: str) -> None:
    with open(tmp_path / name, "wb") as stream:
        np.savez(stream, x=GREY, y=LABELS)
    assert len(load_split(f"npz:{tmp_path / name}")) == 12
    assert len(load_split(f"npz:{tmp_path / name}:x,y@5")) == 5


BAD_LABELS = {
    "one-hot": (np.eye(3, dtype=np.int64)[LABELS], r"shape \(12, 3\) \(one-hot\?\)", "argmax"),
    "column": (LABELS[:, None], r"shape \(12, 1\)", r"labels\[:, 0\]"),
    "float": (LABELS.astype(np.float32), "got float32", "astype"),
    "bool": (LABELS > 1, "got bool", "astype"),
    "negative": (np.where(np.arange(12) == 7, -1, LABELS), "row 7 has -1", "None"),
    "short": (LABELS[:-1], r"shape \(11,\) for 12 rows", "None"),
}


@pytest.mark.parametrize("kind", BAD_LABELS)
def test_labels_that_break_the_rule_are_refused_with_the_remedy(tmp_path: Path, kind: str) -> None:
    labels, message, hint = BAD_LABELS[kind]
    with pytest.raises(DataError, match=message) as caught:
        load_split(write_npz(tmp_path / "a.npz", x=GREY, y=labels))
    assert hint == "None" or re.search(hint, str(caught.value.hint))


def test_integer_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"uint8 or floating point, got integers \(int64\) from 0 to 255"):
        load_split(write_npz(tmp_path / "a.npz", x=GREY.astype(np.int64)))


def test_an_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    with pytest.raises(Untrusted, match="'x' holds Python objects"):
        load_split(write_npz(tmp_path / "a.npz", x=np.array([[{}], [[]]], dtype=object)))


def test_an_array_that_is_not_there_is_reported_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no array 'x'; it has 'images', 'z'"):
        load_split(write_npz(tmp_path / "a.npz", images=GREY, z=LABELS))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.95])
def test_a_truncated_npz_file_is_refused(tmp_path: Path, fraction: float) -> None:
    spec = write_npz(tmp_path / "a.npz", x=GREY)
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(DataError, match="not an npz file"):
        load_split(spec)


def test_an_array_that_claims_more_than_it_has_is_refused_before_it_is_made(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (800000000000, 1, 1), }"
    header += b" " * (63 - len(header) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(50))
    with pytest.raises(DataError, match="'x' is truncated or damaged"):
        load_split(f"npz:{tmp_path / 'a.npz'}")


def write_idx(path: Path, array: np.ndarray, *, is_zipped: bool = False) -> Path:
    data = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    data += array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if is_zipped else data)
    return path


@pytest.mark.parametrize("is_zipped", [False, True])
@pytest.mark.parametrize("folder", ["plain", "a,b"])
def test_idx_files_are_read_as_mnist_publishes_them(tmp_path: Path, is_zipped: bool, folder: str) -> None:
    (tmp_path / folder).mkdir()
    images = write_idx(tmp_path / folder / "images", GREY, is_zipped=is_zipped)
    labels = write_idx(tmp_path / folder / "labels", LABELS, is_zipped=is_zipped)
    split = load_split(f"idx:{images},{labels}@7")
    np.testing.assert_allclose(inputs_of(split)[:, 0].numpy(), GREY[:7] / 255, rtol=1e-6)
    assert labels_of(split) == LABELS[:7].tolist()


def test_idx_images_alone_are_unlabelled(tmp_path: Path) -> None:
    assert not load_split(f"idx:{write_idx(tmp_path / 'images', GREY)}").is_labeled


BAD_IDX = {
    "magic number": b"hello world",
    "needs 4000000000 bytes, but there are 3": struct.pack(">HBBI", 0, 8, 1, 4_000_000_000) + b"abc",
    "there are more": struct.pack(">HBBI", 0, 8, 1, 2) + b"abc",
    "unpack requires": b"",
}


@pytest.mark.parametrize("message", BAD_IDX)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, message: str) -> None:
    (tmp_path / "images").write_bytes(BAD_IDX[message])
    with pytest.raises(DataError, match=message):
        load_split(f"idx:{tmp_path / 'images'}")


def write_images(folder: Path, *, count: int = 3, size: tuple[int, int] = (6, 8), mode: str = "RGB") -> None:
    for name in ("zebra", "ant"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = RANDOM.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{i}.png")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_class_folders_are_read_in_sorted_order(tmp_path: Path, num_workers: int) -> None:
    write_images(tmp_path)
    split = load_split(f"images:{tmp_path}")
    files = sorted(tmp_path.glob("ant/*")) + sorted(tmp_path.glob("zebra/*"))
    expected = np.stack([np.array(Image.open(file)) for file in files]).transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(inputs_of(split, 4, num_workers=num_workers).numpy(), expected, rtol=1e-6)
    assert split.classes == ("ant", "zebra")
    assert labels_of(split) == [0, 0, 0, 1, 1, 1]


def test_a_link_to_a_folder_around_it_is_not_followed(tmp_path: Path) -> None:
    write_images(tmp_path, count=1)
    (tmp_path / "ant" / "again").symlink_to(tmp_path)
    assert load_split(f"images:{tmp_path}").names == ["ant/0.png", "zebra/0.png"]


def test_class_folders_that_are_none_are_told(tmp_path: Path) -> None:
    write_images(tmp_path / "test")
    with pytest.raises(DataError, match="contains split folders, expected class folders: 'test'"):
        load_split(f"images:{tmp_path}")
    (tmp_path / "test/bee").mkdir()
    (tmp_path / "test/bee/0.heic").touch()
    with pytest.raises(DataError, match=r"bee' has files, but no images: '0.heic'"):
        load_split(f"images:{tmp_path / 'test'}")


def test_images_are_resized_and_cropped_when_they_are_read(tmp_path: Path) -> None:
    write_images(tmp_path)
    split = load_split(f"images:{tmp_path}", preprocess=Preprocess(resize=5, crop=4))
    with Image.open(tmp_path / "ant/0.png") as image:
        expected = np.array(image.resize((6, 5), Image.Resampling.BILINEAR).crop((1, 0, 5, 4)))
    np.testing.assert_allclose(inputs_of(split)[0].numpy().transpose(1, 2, 0), expected / 255, rtol=1e-6)


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    write_images(tmp_path, mode="L")
    assert inputs_of(load_split(f"images:{tmp_path}")).shape == (6, 1, 6, 8)


def test_a_grey_image_among_colour_ones_gets_three_channels(tmp_path: Path) -> None:
    write_images(tmp_path)
    Image.new("L", (8, 6), 51).save(tmp_path / "zebra" / "9.png")
    assert (inputs_of(load_split(f"images:{tmp_path}"))[6] == 51 / 255).all()


def test_a_folder_of_images_without_classes_is_unlabelled(tmp_path: Path) -> None:
    write_images(tmp_path)
    split = load_split(f"images:{tmp_path / 'ant'}")
    assert (len(split), split.is_labeled, split.classes) == (3, False, None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_image_is_named_also_by_a_worker(tmp_path: Path, num_workers: int) -> None:
    write_images(tmp_path)
    (tmp_path / "zebra" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"^cannot decode 'zebra/1.png'"):
        inputs_of(load_split(f"images:{tmp_path}"), num_workers=num_workers)


def test_images_of_unequal_size_are_refused_with_the_remedy(tmp_path: Path) -> None:
    write_images(tmp_path)
    Image.new("RGB", (9, 6)).save(tmp_path / "zebra" / "1.png")
    with pytest.raises(DataError, match=r"'zebra/1.png' is 6 x 9") as caught:
        inputs_of(load_split(f"images:{tmp_path}"), 12)
    assert "\0resize\0" in str(caught.value.hint)


def test_a_colour_image_among_grey_ones_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, mode="L")
    Image.new("RGB", (8, 6)).save(tmp_path / "zebra" / "9.png")
    with pytest.raises(DataError, match="is a colour image"):
        inputs_of(load_split(f"images:{tmp_path}"))


def test_images_of_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        inputs_of(load_split(f"images:{tmp_path}"))


def test_a_folder_with_no_images_or_with_both_kinds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    with pytest.raises(DataError, match="no images in"):
        load_split(f"images:{tmp_path}")
    Image.new("RGB", (4, 4)).save(tmp_path / "loose.png")
    with pytest.raises(DataError, match="both images and folders"):
        load_split(f"images:{tmp_path}")


DATASETS = """
import numpy as np, torch
from torch.utils.data import Dataset, IterableDataset

class Pairs(Dataset):
    classes = ["no", "yes"]
    def __init__(self, labels): self.labels = labels
    def __len__(self): return len(self.labels)
    def __getitem__(self, i): return torch.full((2, 3), float(i)), self.labels[i]

class Bare(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return np.full((2, 3), i, np.float32)

class Stream(IterableDataset):
    def __iter__(self): return iter([])

def pairs(): return Pairs([0, 1, torch.tensor(1), np.int64(0)])
def soft(): return Pairs([0, 1, 0.5])
def mixed(): return Pairs([0, None])
def empty(): return Pairs([])
"""


@pytest.fixture
def datasets(tmp_path: Path) -> Iterator[Path]:
    path, modules = list(sys.path), set(sys.modules)
    (tmp_path / "sets.py").write_text(DATASETS)
    yield tmp_path / "sets.py"
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_dataset_gives_inputs_labels_and_class_names(datasets: Path) -> None:
    split = load_split(f"py:{datasets}:pairs")
    assert inputs_of(split, 3)[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert labels_of(split) == [0, 1, 1, 0]
    assert split.classes == ("no", "yes")
    assert split.content_digest() is None


def test_a_dataset_of_bare_inputs_is_unlabelled(datasets: Path) -> None:
    split = load_split(f"py:{datasets}:Bare@3")
    assert inputs_of(split)[:, 1, 2].tolist() == [0, 1, 2]
    assert not split.is_labeled


BAD_DATASETS: dict[str, tuple[type[BnnError], str]] = {
    "soft": (DataError, "row 2: labels must be integers"),
    "mixed": (DataError, "some items have labels and some do not"),
    "empty": (DataError, "no examples"),
    "Stream": (UsageError, "expected a map-style Dataset"),
    "absent": (UsageError, "no callable named 'absent'"),
}


@pytest.mark.parametrize("name", BAD_DATASETS)
def test_a_dataset_that_breaks_a_rule_is_refused(datasets: Path, name: str) -> None:
    error, message = BAD_DATASETS[name]
    with pytest.raises(error, match=message):
        inputs_of(load_split(f"py:{datasets}:{name}"))


@pytest.mark.parametrize("spec", ["train.npz", "xml:train.xml", "npz:", ":x"])
def test_a_spec_of_no_known_kind_lists_the_kinds(spec: str) -> None:
    with pytest.raises(UsageError, match=r"expected npz:FILE.*idx:IMAGES,LABELS, images:DIR.* py:module:factory.* or "):
        load_split(spec)


@pytest.mark.parametrize("spec", ["npz:none.npz", "idx:a,b", "images:none", "py:none.py:make", "npz:none.npz:x@3"])
def test_data_that_is_not_there_is_a_missing_input(spec: str) -> None:
    with pytest.raises(MissingInput, match=r"no (file|folder)"):
        load_split(spec)


@pytest.mark.parametrize("count", [0, 13])
def test_more_rows_than_there_are_cannot_be_taken(tmp_path: Path, count: int) -> None:
    with pytest.raises(DataError, match=f"{count} rows, but there are only 12"):
        load_split(f"{write_npz(tmp_path / 'a.npz', x=GREY)}@{count}")


def test_split_options_have_a_name_and_a_spec() -> None:
    assert parse_split("val=npz:a=b.npz") == ("val", "npz:a=b.npz")
    for text, message in [("npz:a.npz", "SPLIT=SPEC"), ("a/b=npz:x", "letters, digits"), ("=npz:x", "letters, digits")]:
        with pytest.raises(UsageError, match=message):
            parse_split(text)


def test_hold_out_moves_each_row_once(tmp_path: Path) -> None:
    spec = write_npz(tmp_path / "a.npz", x=GREY, y=np.arange(12))
    splits = hold_out({"test": load_split(spec)}, "val=test:5", seed=3)
    assert (len(splits["test"]), len(splits["val"])) == (7, 5)
    assert sorted(labels_of(splits["test"]) + labels_of(splits["val"])) == list(range(12))
    assert splits["val"].rows.tolist() == labels_of(splits["val"]) == sorted(labels_of(splits["val"]))


def test_rows_held_out_keep_what_their_split_was(tmp_path: Path) -> None:
    one = load_split(write_npz(tmp_path / "a.npz", x=GREY, y=LABELS), name="far").as_ood()
    splits = hold_out({"far": one}, "part=far:5", seed=0)
    assert {name: (split.name, split.held_out) for name, split in splits.items()} == {
        "far": ("far", "part=far:5"), "part": ("part", "part=far:5"),
    }  # fmt: skip
    assert all(split.is_ood and split.labels is None and split.spec == one.spec for split in splits.values())
    assert one.held_out is None


def test_ready_features_are_identified_by_the_rows_chosen(tmp_path: Path) -> None:
    def digest(rows: list[int], **changed: Any) -> str | None:
        np.savez(tmp_path / "f.npz", **({"features_a": FEATURES, "labels_a": LABELS[:6]} | changed))
        dataset = read_feature_arrays(tmp_path / "f.npz").splits["a"]
        spec = f"{tmp_path}/f.npz:features_a"
        return InputSplit(spec, dataset, np.array(rows), Preprocess(), dataset.is_labeled).content_digest()

    elsewhere = np.where(np.arange(6)[:, None] == 5, 7, FEATURES)
    assert digest([0, 2]) == digest([0, 2], features_a=elsewhere)
    names = np.array(list("abcdef"))
    others = [digest([0, 3]), digest([0, 5], features_a=elsewhere), digest([0, 2], labels_a=LABELS[:6] + 1)]
    assert len({digest([0, 2]), *others, digest([0, 2], names_a=names), digest([0, 5])}) == 6


def test_hold_out_chooses_by_the_seed_and_all_rows_alike() -> None:
    def moved(seed: int) -> np.ndarray:
        return hold_out_rows(20, 5, seed)[1]

    np.testing.assert_array_equal(moved(1), moved(1))
    counts = np.bincount(np.concatenate([moved(seed) for seed in range(400)]), minlength=20)
    # Each row moves with probability 1/4: mean 100, standard deviation 8.7.
    assert np.abs(counts - 100).max() < 4 * 8.7


HOLD_OUT_ERRORS = {
    "val=test": "expected NEW=OLD:N",
    "val=none:3": r"no split .none. in this command \(have: test, train\)",
    "train=test:3": "split 'train' already exists",
    "val=test:12": "expected 1 to 11 of the 12 rows left in 'test'",
    "val=test:0": "expected 1 to 11 of the 12 rows left in 'test'",
}


@pytest.mark.parametrize("text", HOLD_OUT_ERRORS)
def test_impossible_hold_outs_are_usage_errors(tmp_path: Path, text: str) -> None:
    split = load_split(write_npz(tmp_path / "a.npz", x=GREY))
    with pytest.raises(UsageError, match=HOLD_OUT_ERRORS[text]):
        hold_out({"test": split, "train": split}, text, seed=0)


def test_the_content_digest_knows_values_labels_and_rows_but_not_places(tmp_path: Path) -> None:
    split = load_split(write_npz(tmp_path / "a.npz", x=GREY, y=LABELS))
    np.savez(tmp_path / "moved.npz", x=GREY, y=LABELS)
    assert load_split(f"npz:{tmp_path / 'moved.npz'}").content_digest() == split.content_digest()
    others = [split.take(np.arange(11)), load_split(write_npz(tmp_path / "b.npz", x=GREY, y=LABELS + 1))]
    others.append(load_split(write_npz(tmp_path / "c.npz", x=GREY + 1, y=LABELS)))
    assert len({other.content_digest() for other in [split, *others]}) == 4


def test_the_content_digest_of_images_knows_bytes_and_names(tmp_path: Path) -> None:
    write_images(tmp_path / "one")
    first = load_split(f"images:{tmp_path / 'one'}").content_digest()
    (tmp_path / "one").rename(tmp_path / "two")
    assert load_split(f"images:{tmp_path / 'two'}").content_digest() == first
    (tmp_path / "two/zebra").rename(tmp_path / "two/yak")
    assert load_split(f"images:{tmp_path / 'two'}").content_digest() != first


def test_a_split_without_labels_forgets_them(tmp_path: Path) -> None:
    split = load_split(write_npz(tmp_path / "a.npz", x=GREY, y=LABELS)).as_ood()
    assert split.labels is None
    assert labels_of(split) == []


FEATURES = RANDOM.normal(size=(6, 3)).astype(np.float32)


def test_features_of_ones_own_are_read(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "features_train": FEATURES,
        "labels_train": LABELS[:6],
        "features_ood": FEATURES[:2].astype(np.float64),
    }
    np.savez(tmp_path / "f.npz", head_weight=np.ones((3, 3)), head_bias=np.zeros(3), **arrays)
    found = read_feature_arrays(tmp_path / "f.npz")
    assert set(found.splits) == {"train", "ood"}
    assert {name for name, dataset in found.splits.items() if dataset.is_labeled} == {"train"}
    np.testing.assert_array_equal(found.splits["ood"].features, FEATURES[:2])
    assert found.head_weight.dtype == np.float32


BAD_FEATURES: dict[str, dict[str, Any]] = {
    "got only nothing": {},
    "unexpected 'stray'": {"features_a": FEATURES, "stray": FEATURES},
    r"expected \(N, D\) with N > 0": {"features_a": FEATURES[0]},
    "splits have different numbers of features": {"features_a": FEATURES, "features_b": FEATURES[:, :2]},
    r"head_weight has shape \(2, 2\), expected \(K, 3\)": {"features_a": FEATURES, "head_weight": np.ones((2, 2))},
    r"head_weight has shape \(0, 3\), expected \(K, 3\)": {"features_a": FEATURES, "head_weight": np.ones((0, 3))},
    "head_bias but no head_weight": {"features_a": FEATURES, "head_bias": np.ones(2)},
    "has type int64": {"features_a": np.ones((2, 3), dtype=np.int64)},
    "1 values that are not finite in float32; the first is in row 4": {
        "features_a": np.where(np.arange(18).reshape(6, 3) == 13, 1e300, FEATURES.astype(float))
    },
    "labels_a row 2 is 2, expected 0 to 1": {"features_a": FEATURES, "labels_a": LABELS[:6], "head_weight": np.ones((2, 3))},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_FEATURES)
def test_features_that_do_not_fit_are_refused(tmp_path: Path, message: str) -> None:
    np.savez(tmp_path / "f.npz", **BAD_FEATURES[message])
    with pytest.raises(DataError, match=message):
        read_feature_arrays(tmp_path / "f.npz")


def test_a_data_set_that_raises_names_the_row(tmp_path: Path) -> None:
    code = "class Odd:\n    def __len__(self):\n        return 9\n    def __getitem__(self, i):\n"
    code += "        import torch\n        return torch.zeros(3), [0, 1][i]\n"
    (tmp_path / "odd_rows.py").write_text(code)
    split = load_split(f"py:{tmp_path}/odd_rows.py:Odd")
    with pytest.raises(DataError, match="row 2 raised IndexError"):
        list(split.batches(4))


def test_two_arrays_of_one_name_in_an_npz_file_are_refused(tmp_path: Path) -> None:
    spec = write_npz(tmp_path / "twice.npz", x=np.ones((4, 3), np.float32), y=np.arange(4))
    with zipfile.ZipFile(tmp_path / "twice.npz", "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own, of the name
        archive.writestr("y.npy", archive.read("x.npy"))
    with pytest.raises(DataError, match="several arrays with the same name: 'y'"):
        load_split(spec)


PARENT = os.getpid()


class Deadly:
    """Rows of zeros; a process that reads row 2 is killed."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        if row == 2 and os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(3, np.float32), 0


def test_a_killed_process_is_told_of_and_no_other_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.data.kinds.py.user_code.load_factory", lambda *_, **__: Deadly)
    split = load_split("py:deadly.py:make")
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))  # seconds; else 5
    batches = split.batches(2, num_workers=2)
    next(batches)
    time.sleep(0.2)  # the network, busy while the process dies: it is not to blame
    with pytest.raises(DeviceError, match="a data loading worker was killed by SIGKILL") as caught:
        next(batches)
    assert caught.value.code == "reader_died"
    assert not multiprocessing.active_children()


class Numbers:
    """Four rows, each of its own number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return np.full(3, row, np.float32), row


def test_batches_need_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    def overdue(*_: object) -> None:
        raise TimeoutError("the batch never came")

    monkeypatch.setattr("bnncli.data.kinds.py.user_code.load_factory", lambda *_, **__: Numbers)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", full)
    split = load_split("py:numbers.py:make")
    before = signal.signal(signal.SIGALRM, overdue)
    signal.alarm(60)
    try:
        batches = list(split.batches(2, num_workers=2))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert [batch.labels.tolist() for batch in batches if batch.labels is not None] == [[0, 1], [2, 3]]


def split_of(folder: Path, *names: str) -> InputSplit:
    """One image in a folder for each class."""
    for name in names:
        (folder / name).mkdir()
        Image.new("L", (2, 2)).save(folder / name / "0.png")
    return load_split(f"images:{folder}", name="train")


def class_labels(split: InputSplit) -> list[int]:
    """Those of the batches, which are those that the split tells of beforehand."""
    found = [label for batch in split.batches(2) if batch.labels is not None for label in batch.labels.tolist()]
    assert found == split.labels.tolist()
    return found


MATCHES = {
    ("cat", "dog"): (("dog", "cat"), [1, 0]),
    ("neg", "pos"): (("POS", " Neg"), [1, 0]),
    ("b", "c"): (("a", "b", "c"), [1, 2]),  # some of the classes alone
    ("0", "10", "2"): (tuple("abcdefghijk"), [0, 2, 10]),  # numbers are the model's own
    ("1", "2"): (("2", "1"), [1, 0]),  # and names where it has names like them
    ("A", "a"): (("a", "A"), [1, 0]),
}


@pytest.mark.parametrize("names", MATCHES)
def test_labels_are_matched_by_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    classes, expected = MATCHES[names]
    split = match_classes(split_of(tmp_path, *names), classes)
    assert class_labels(split) == expected
    assert split.classes == classes
    assert class_labels(split.take(np.array([1]))) == expected[1:2]


def test_whole_numbers_are_the_models_own(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=[2, 0, 1])
    split = match_classes(load_split(f"npz:{tmp_path / 'a.npz'}"), ("a", "b", "c"))
    assert class_labels(split) == [2, 0, 1]
    assert split.classes == ("a", "b", "c")


def test_a_model_that_names_no_classes_leaves_the_datas(tmp_path: Path) -> None:
    split = split_of(tmp_path, "cat", "dog")
    assert match_classes(split, None) is split


@pytest.mark.parametrize(("names", "expected"), [(("0", "10", "2"), [0, 2, 10]), (("1", "0010"), [1, 10])])
def test_folders_that_are_numbers_are_these_numbers(
    tmp_path: Path, names: tuple[str, ...], expected: list[int]
) -> None:
    split = match_classes(split_of(tmp_path, *names), None)
    assert class_labels(split) == expected
    assert split.classes is None


@pytest.mark.parametrize(
    ("names", "message"), [(("1", "01"), "the classes '01', '1' have the same number"), (("1", "99999999"), "expected at most 999999")]
)  # fmt: skip
def test_folders_that_are_no_numbers_of_classes_are_refused(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        match_classes(split_of(tmp_path, *names), None)


def test_other_classes_are_no_error_where_they_are_out_of_distribution(tmp_path: Path) -> None:
    split = split_of(tmp_path, "bird", "fish").as_ood()
    assert match_classes(split, ("cat", "dog")) is split


MISMATCHES = {
    ("cat", "fish"): (("cat", "dog"), "split 'train' has the classes 'cat', 'fish'; the model has 'cat', 'dog'$"),
    ("Cat", "cat"): (("cat", "dog"), "has the classes 'Cat', 'cat'; the model has 'cat', 'dog'$"),
    ("0", "3"): (("cat", "dog"), "has the classes '0', '3'; the model has 'cat', 'dog'$"),
    ("a", "z"): (tuple("abcdefghijkl"), "'g', 'h' and 4 more; not in the model: 'z'$"),
}


@pytest.mark.parametrize("names", MISMATCHES)
def test_classes_that_the_model_does_not_have_are_refused_with_both_lists(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    classes, message = MISMATCHES[names]
    with pytest.raises(DataError, match=message) as caught:
        match_classes(split_of(tmp_path, *names), classes)
    assert caught.value.code == "class_mismatch"


large = pytest.mark.usefixtures("all_are_large")
ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arrays, "MAPPED_BYTES", 1)
    monkeypatch.chdir(tmp_path)


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


@large
def test_an_array_that_lies_as_it_is_is_mapped_and_others_are_read() -> None:
    np.savez("plain.npz", x=ROWS, y=np.arange(6))
    np.savez_compressed("packed.npz", x=ROWS)
    np.savez("columns.npz", x=np.asfortranarray(ROWS))
    for name, is_there in (("plain", True), ("packed", False), ("columns", False)):
        found = read_npz(Path(f"{name}.npz"), ["x"])["x"]
        np.testing.assert_array_equal(found, ROWS)
        assert is_mapped(found) == is_there
    split = load_split("npz:plain.npz")
    assert is_mapped(split.dataset.inputs)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(next(split.batches(4)).inputs.numpy(), ROWS[:4])  # type: ignore[union-attr]


@large
def test_a_changed_byte_is_told_before_anything_is_mapped() -> None:
    np.savez("plain.npz", x=ROWS)
    raw = bytearray(Path("plain.npz").read_bytes())
    raw[raw.index(ROWS.tobytes()) + 5] ^= 1
    Path("plain.npz").write_bytes(raw)
    with pytest.raises(DataError, match="truncated or damaged"):
        read_npz(Path("plain.npz"), ["x"])


RNG = np.random.default_rng(0)
ARRAYS = {
    "X": RNG.integers(0, 256, (5, 4, 3, 2), dtype=np.uint8), "y": np.array([[10], [1]]),
    "small": np.array([[7]], np.uint8), "real": RNG.normal(size=(2, 3)),
    "single": RNG.normal(size=(4, 1)).astype(np.float32), "negative": np.array([[-3, 300]], np.int16),
    "none": np.zeros((0, 3)),
}  # fmt: skip
OTHERS = {"text": "a text", "complex": np.array([[1 + 2j]]), "cell": np.array(["a", 1], object), "struct": {"a": 1}}


@pytest.mark.parametrize("is_packed", [False, True])
def test_arrays_are_those_that_scipy_reads(tmp_path: Path, is_packed: bool) -> None:
    savemat(tmp_path / "a.mat", {**OTHERS, **ARRAYS}, do_compression=is_packed)
    found, expected = read_mat(tmp_path / "a.mat", list(ARRAYS)), loadmat(tmp_path / "a.mat")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], expected[name])
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
    for name in OTHERS:
        with pytest.raises(DataError, match=f"has no numeric array '{name}'"):
            read_mat(tmp_path / "a.mat", [name])


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_damage_is_an_error_of_ours(tmp_path: Path, is_packed: bool) -> None:
    stream, path = io.BytesIO(), tmp_path / "a.mat"
    savemat(stream, {"y": ARRAYS["y"], "single": ARRAYS["single"]}, do_compression=is_packed)
    whole = stream.getvalue()
    damaged = [whole[:end] for end in range(0, len(whole), 5)]
    damaged += [
        whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at in range(124, len(whole)) for bit in (1, 128)
    ]
    damaged, cut, told = damaged[::3], len(range(0, len(whole), 15)), 0
    for content in damaged:
        path.write_bytes(content)
        try:
            read_mat(path, ["y", "single"])
        except BnnError:
            told += 1
    assert told >= (len(damaged) - 2 if is_packed else cut)  # packed arrays have a checksum
