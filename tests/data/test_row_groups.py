"""The groups of rows: where they come from, how they are numbered, and that hold-outs keep them whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from bnncli.data.splits import InputSplit, hold_out, load_split
from bnncli.errors import DataError, UsageError

NAMES = ["b", "a", "b", "c", "a", "a"]
NUMBERS = [4, 0, 4, 7, 0, 0]


def write_table(folder: Path, kind: str, groups: list[object]) -> str:
    path = folder / f"rows.{kind}"
    columns = {"who": groups, "x1": [float(row) for row in range(6)], "x2": [1.5] * 6, "label": [0, 1] * 3}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if kind == "parquet":
        parquet.write_table(pyarrow.table(columns), path)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with open(path, "w", newline="") as stream:
            writer = csv.DictWriter(stream, list(columns), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return f"{kind}:{path}:x=x1+x2,group=who"


def grouped(labels: list[object]) -> list[list[int]]:
    """Which rows share a group."""
    return [[row for row, other in enumerate(labels) if other == one] for one in dict.fromkeys(labels)]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_column_of_a_table_is_the_group_of_its_rows(tmp_path: Path, kind: str) -> None:
    split = load_split(write_table(tmp_path, kind, list(NUMBERS)))
    assert split.groups is not None
    assert split.groups.tolist() == NUMBERS
    assert split.labels is not None
    assert split.labels.tolist() == [0, 1] * 3
    split = load_split(write_table(tmp_path, kind, list(NAMES)))
    assert split.groups is not None
    assert grouped(split.groups.tolist()) == grouped(list(NAMES))
    assert split.groups.dtype == np.int64
    assert (split.groups < 0).all()


def test_a_name_is_the_same_group_in_every_file_and_digests_without_groups_stay(tmp_path: Path) -> None:
    spec = write_table(tmp_path, "csv", list(NAMES))
    plain, first = load_split(spec.removesuffix(",group=who")), load_split(spec)
    assert plain.groups is None
    assert plain.order_digest != first.order_digest
    (tmp_path / "other").mkdir()
    other = load_split(write_table(tmp_path / "other", "parquet", [*NAMES[3:], *NAMES[:3]]))
    assert first.groups is not None
    assert other.groups is not None
    assert other.groups.tolist() == [*first.groups[3:], *first.groups[:3]]


def test_an_array_of_an_npz_file_has_the_groups(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((6, 2), np.float32), "y": np.arange(6) % 2}
    np.savez(tmp_path / "a.npz", **arrays, groups=np.array(NAMES))
    split = load_split(f"npz:{tmp_path / 'a.npz'}")
    assert split.groups is not None
    assert grouped(split.groups.tolist()) == grouped(list(NAMES))
    np.savez(tmp_path / "b.npz", **arrays)
    assert load_split(f"npz:{tmp_path / 'b.npz'}").order_digest != split.order_digest
    np.savez(tmp_path / "a.npz", **arrays, groups=np.zeros((6, 2)))
    with pytest.raises(DataError, match=r"'groups' has type float64 and shape \(6, 2\), expected texts or numbers"):
        load_split(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("missing", ["", "  ", None, float("nan")])
def test_a_row_without_a_group_is_named(tmp_path: Path, missing: object) -> None:
    spec = write_table(tmp_path, "jsonl", ["b", "a", missing, "c", "a", "a"])
    with pytest.raises(DataError, match="row 2 has no group"):
        load_split(spec)


def test_wrong_columns_of_groups_are_refused(tmp_path: Path) -> None:
    spec = write_table(tmp_path, "csv", list(NAMES))
    with pytest.raises(DataError, match="no column 'whom'"):
        load_split(spec + "m")
    with pytest.raises(UsageError, match="group= takes one column"):
        load_split(spec + "+label")
    with pytest.raises(UsageError, match="label= and group= name the same column"):
        load_split(spec.rpartition("group=")[0] + "label=label,group=label")


def rows_in_groups(tmp_path: Path, num_groups: int) -> InputSplit:
    sizes = np.random.default_rng(0).integers(1, 8, size=num_groups)
    groups = np.repeat(np.arange(num_groups), sizes)
    np.savez(tmp_path / "a.npz", x=np.zeros((len(groups), 2), np.float32), y=groups % 2, groups=groups)
    return load_split(f"npz:{tmp_path / 'a.npz'}")


def test_a_hold_out_moves_whole_groups_and_nearly_as_many_rows_as_asked(tmp_path: Path) -> None:
    split, sizes, moved = rows_in_groups(tmp_path, 40), [], []
    for seed in range(200):
        found = hold_out({"test": split}, "val=test:60", seed=seed)
        own, other = found["val"].groups, found["test"].groups
        assert own is not None
        assert other is not None
        assert not {*own.tolist()} & {*other.tolist()}
        assert len(own) + len(other) == len(split)
        sizes.append(len(own))
        moved.append(np.isin(np.arange(40), own))
    assert max(abs(size - 60) for size in sizes) <= 3
    shares = np.mean(moved, axis=0)  # of the seeds, for each group; its size hardly matters
    assert shares == pytest.approx(np.full(40, 60 / len(split)), abs=5 * 0.5 / np.sqrt(200))


def test_a_hold_out_of_few_groups_leaves_one_and_takes_one(tmp_path: Path) -> None:
    split = rows_in_groups(tmp_path, 2)
    for count in (1, len(split) - 1):
        found = hold_out({"test": split}, f"val=test:{count}", seed=1)
        assert {len(np.unique(one.groups)) for one in found.values()} == {1}
    with pytest.raises(UsageError, match="all rows of 'test' are of one group"):
        hold_out({"test": rows_in_groups(tmp_path, 1)}, "val=test:1", seed=1)
