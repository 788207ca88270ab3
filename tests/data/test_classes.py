"""Labels of data matched to a model's classes by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bnncli.data.labels import matched_to
from bnncli.data.splits import InputSplit, load_split
from bnncli.errors import DataError


def split_of(folder: Path, *names: str) -> InputSplit:
    """One image in a folder for each class."""
    for name in names:
        (folder / name).mkdir()
        Image.new("L", (2, 2)).save(folder / name / "0.png")
    return load_split(f"images:{folder}", name="train")


def labels_of(split: InputSplit) -> list[int]:
    """Those of the batches, which are those that the split tells of beforehand."""
    found = [label for batch in split.batches(2) if batch.labels is not None for label in batch.labels.tolist()]
    assert split.labels is not None
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
    split = matched_to(split_of(tmp_path, *names), classes)
    assert labels_of(split) == expected
    assert split.classes == classes
    assert labels_of(split.take(np.array([1]))) == expected[1:2]


def test_whole_numbers_are_the_models_own(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=[2, 0, 1])
    split = matched_to(load_split(f"npz:{tmp_path / 'a.npz'}"), ("a", "b", "c"))
    assert labels_of(split) == [2, 0, 1]
    assert split.classes == ("a", "b", "c")


def test_a_model_that_names_no_classes_leaves_the_datas(tmp_path: Path) -> None:
    split = split_of(tmp_path, "cat", "dog")
    assert matched_to(split, None) is split


@pytest.mark.parametrize(("names", "expected"), [(("0", "10", "2"), [0, 2, 10]), (("1", "0010"), [1, 10])])
def test_folders_that_are_numbers_are_these_numbers(
    tmp_path: Path, names: tuple[str, ...], expected: list[int]
) -> None:
    split = matched_to(split_of(tmp_path, *names), None)
    assert labels_of(split) == expected
    assert split.classes is None


@pytest.mark.parametrize(
    ("names", "message"), [(("1", "01"), "the classes '01', '1' have the same number"), (("1", "99999999"), "expected at most 999999")]
)  # fmt: skip
def test_folders_that_are_no_numbers_of_classes_are_refused(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        matched_to(split_of(tmp_path, *names), None)


def test_other_classes_are_no_error_where_they_are_out_of_distribution(tmp_path: Path) -> None:
    split = split_of(tmp_path, "bird", "fish").as_ood()
    assert matched_to(split, ("cat", "dog")) is split


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
        matched_to(split_of(tmp_path, *names), classes)
    assert caught.value.code == "class_mismatch"
