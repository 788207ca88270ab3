"""extract-features and predict --skip-unreadable: what cannot be read is left out, listed with the reason, and counted."""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from problems.command_line import Cli, Invocation

LENET = Path(__file__).parents[2] / "fixtures/lenet5-fmnist.pt"
DAMAGED = {3: "a/03.png", 8: "b/00.png"}  # row, in the order of sorted names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and sixteen images in two classes, of which the first of class b is no image and another is cut off."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(LENET, tmp_path / "net.pt")
    draw = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            image = Image.fromarray(draw.integers(0, 256, (28, 28), dtype=np.uint8))
            image.save(tmp_path / "images" / name / f"{number:02d}.png")
    content = (tmp_path / "images" / DAMAGED[3]).read_bytes()
    (tmp_path / "images" / DAMAGED[3]).write_bytes(content[: len(content) // 2])
    (tmp_path / "images" / DAMAGED[8]).write_bytes(b"<html>")
    return tmp_path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


SKIP = ("--skip-unreadable", "--max-skipped", 0.2)


def extract(cli: Cli, *words: object) -> Invocation:
    line = ("net.pt", "--model", "lenet5", "--data", "test=images:images", "--classes", "a,b,c,d,e,f,g,h,i,j")
    return cli("extract-features", *line, *words)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_unreadable_images_are_left_out_and_listed(cli: Cli, folder: Path, num_workers: int) -> None:
    result = extract(cli, *SKIP, "--num-workers", num_workers, "--json").expect(0).json
    features = folder / "net.pt.bnn/features"
    with h5py.File(features / "test.h5") as file:
        assert file["sample_id"][:].tolist() == [row for row in range(16) if row not in DAMAGED]
        assert file["labels"][:].tolist() == [0] * 7 + [1] * 7
    listed = rows_of(features / "test.skipped.csv")
    assert {int(row["sample_id"]): row["name"] for row in listed} == DAMAGED
    assert ["truncated" in listed[0]["reason"], "unknown image format" in listed[1]["reason"]] == [True, True]
    (output,) = (one for one in result["outputs"] if one["role"] == "skipped")
    assert (output["examples"], output["split"]) == (2, "test")


def test_without_the_option_they_are_refused_and_nothing_is_written(cli: Cli, folder: Path) -> None:
    found = extract(cli).expect(65)
    assert "cannot decode" in found.stderr
    assert "--skip-unreadable" in found.stderr
    assert not (folder / "net.pt.bnn/features/test.h5").exists()


def test_more_than_the_allowed_share_is_an_error(cli: Cli, folder: Path) -> None:
    found = extract(cli, "--skip-unreadable").expect(65)  # one in a hundred by default
    assert "2 of 16 examples cannot be read (12.5%), more than the allowed 1.0%" in found.stderr
    assert not list(folder.glob("net.pt.bnn/features/*"))
    assert "--skip-unreadable" in extract(cli, "--max-skipped", 0.2).expect(2).stderr


def test_the_list_goes_once_every_image_can_be_read(cli: Cli, folder: Path) -> None:
    extract(cli, *SKIP).expect(0)
    for name in DAMAGED.values():
        (folder / "images" / name).write_bytes((folder / "images/a/00.png").read_bytes())
    extract(cli, *SKIP, "--force").expect(0)
    assert [path.name for path in folder.glob("net.pt.bnn/features/*")] == ["test.h5"]


def test_new_data_are_predicted_without_them(cli: Cli, folder: Path) -> None:
    extract(cli, *SKIP).expect(0)
    line = ("net.pt", "--data", "new=images:images", "--table", "new.csv")
    assert "--skip-unreadable" in cli("predict", *line).expect(65).stderr
    cli("predict", *line, *SKIP).expect(0)
    assert len(rows_of(folder / "new.csv")) == 14
    assert [row["name"] for row in rows_of(folder / "new.skipped.csv")] == [*DAMAGED.values()]
    assert "--data" in cli("predict", "net.pt", "--skip-unreadable").expect(2).stderr


def test_images_named_by_a_table_may_be_missing(cli: Cli, folder: Path) -> None:
    names = [f"images/a/{number:02d}.png" for number in (7, 1, 2)]
    (folder / "rows.csv").write_text("path,label\n" + "".join(f"{name},1\n" for name in ["images/none.png", *names]))
    words = ("net.pt", "--model", "lenet5", "--data", "test=csv:rows.csv:image=path,label=label")
    cli("extract-features", *words, "--skip-unreadable", "--max-skipped", 0.3).expect(0)
    (row,) = rows_of(folder / "net.pt.bnn/features/test.skipped.csv")
    assert row["sample_id"] == "0"
    assert "none.png" in row["reason"]


def test_a_class_whose_images_are_all_damaged_is_left_out(cli: Cli, folder: Path) -> None:
    for path in (folder / "images/b").iterdir():
        path.write_bytes(b"<html>")
    extract(cli, "--skip-unreadable", "--max-skipped", 1).expect(0)
    with h5py.File(folder / "net.pt.bnn/features/test.h5") as file:
        assert file["sample_id"][:].tolist() == [row for row in range(8) if row != 3]


def test_a_split_without_any_readable_image_is_an_error(cli: Cli, folder: Path) -> None:
    for path in (folder / "images").glob("*/*"):
        path.write_bytes(b"<html>")
    found = extract(cli, "--skip-unreadable", "--max-skipped", 1).expect(65)
    assert "cannot decode 'a/00.png'" in found.stderr
    assert "--skip-unreadable" not in found.stderr  # which was given
    assert not list(folder.glob("net.pt.bnn/features/*"))


def test_the_first_image_of_a_shard_may_be_damaged(cli: Cli, folder: Path) -> None:
    with tarfile.open(folder / "shard.tar", "w") as shard:
        for number, content in enumerate((b"<html>", (folder / "images/a/00.png").read_bytes())):
            for suffix, data in (("png", content), ("cls", b"0")):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    line = ("net.pt", "--model", "lenet5", "--data", "test=webdataset:shard.tar")
    cli("extract-features", *line, "--skip-unreadable", "--max-skipped", 0.5).expect(0)
    assert len(rows_of(folder / "net.pt.bnn/features/test.skipped.csv")) == 1


def test_a_foreign_file_in_the_place_of_the_list_is_kept(cli: Cli, folder: Path) -> None:
    extract(cli, *SKIP).expect(0)
    line = ("predict", "net.pt", "--data", "new=images:images", "--table", "new.csv", *SKIP)
    (folder / "new.skipped.csv").write_text("mine")
    found = cli(*line).expect(73)
    assert "new.skipped.csv exists and is not a list of unreadable examples created by bnncli" in found.stderr
    assert (folder / "new.skipped.csv").read_text() == "mine"
    cli(*line, "--force").expect(0)
    cli(*line).expect(0)
    assert len(rows_of(folder / "new.skipped.csv")) == 2


def test_names_in_the_list_are_no_formulas(cli: Cli, folder: Path) -> None:
    (folder / "=1+1.png").write_bytes(b"<html>")
    (folder / "rows.csv").write_text("path,label\nimages/a/00.png,1\nimages/a/01.png,0\n=1+1.png,1\n")
    words = ("net.pt", "--model", "lenet5", "--data", "test=csv:rows.csv:image=path,label=label")
    cli("extract-features", *words, "--skip-unreadable", "--max-skipped", 0.4).expect(0)
    (row,) = rows_of(folder / "net.pt.bnn/features/test.skipped.csv")
    assert row["name"] == "'=1+1.png"
