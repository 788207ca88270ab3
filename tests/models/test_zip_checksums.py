"""Checksums that torch writes and does not look at: no flipped byte of a checkpoint or npz file changes what is used."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.data.arrays import read_npz
from bnncli.errors import BnnError, DataError, Untrusted
from bnncli.models.checkpoint_files import UNCHECKED, check_checksums
from bnncli.models.checkpoints import convert_checkpoint, load_checkpoint
from bnncli.numerics.digests import tensor_digest

pytestmark = pytest.mark.libraries

STATE = {"fc.weight": torch.linspace(-1, 1, 600).reshape(20, 30), "fc.bias": torch.arange(20.0)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def content_positions(path: Path) -> list[int]:
    """Where the bytes of all members lie in a zip file whose members are stored."""
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = [(raw.index(archive.read(one)), one.file_size) for one in archive.infolist() if one.file_size > 4]
    return [start + place for start, size in members for place in range(size)]


def flipped(path: Path, position: int, bit: int) -> Path:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    target = path.with_name(f"flipped{path.suffix}")
    target.write_bytes(content)
    return target


@pytest.mark.parametrize("trust", [False, True])
def test_every_flipped_bit_of_the_content_is_told(saved: Path, trust: bool) -> None:
    generator = np.random.default_rng(0)
    for position in generator.choice(content_positions(saved), size=100, replace=False):
        path = flipped(saved, int(position), int(generator.integers(8)))
        with pytest.raises(DataError, match="is damaged: checksum mismatch") as caught:
            convert_checkpoint(path, trust_pickle=trust)
        assert (caught.value.code, caught.value.hint) == ("damaged", "copy or download it again")


def outcomes(path: Path, read: Callable[[Path], str], stride: int) -> set[str]:
    """What reading gives for a file with one byte flipped, at every so many places: a digest, or "refused"."""
    found = set()
    for position in range(0, path.stat().st_size, stride):
        try:
            found.add(read(flipped(path, position, position % 8)))
        except (DataError, Untrusted):
            found.add("refused")
    return found


def test_a_file_with_a_flipped_byte_anywhere_is_refused_or_means_the_same(saved: Path) -> None:
    whole = load_checkpoint(saved).weights_digest
    assert outcomes(saved, lambda path: load_checkpoint(path).weights_digest, 19) == {"refused", whole}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_with_a_flipped_byte_anywhere_is_refused_or_means_the_same(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    save(tmp_path / "a.npz", x=np.linspace(0, 1, 300).reshape(30, 10), y=np.arange(30))
    digest = tensor_digest(read_npz(tmp_path / "a.npz", ("x", "y")))
    read = outcomes(tmp_path / "a.npz", lambda path: tensor_digest(read_npz(path, ("x", "y"))), 17)
    assert read == {"refused", digest}


def test_a_checkpoint_saved_without_checksums_is_read_and_said_to_have_none(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    checkpoint = load_checkpoint(tmp_path / "a.pt")
    assert checkpoint.notes == (UNCHECKED,)
    assert checkpoint.weights_digest == tensor_digest(STATE)


def test_one_member_without_a_checksum_among_others_that_have_one_is_damage(saved: Path) -> None:
    content = saved.read_bytes()
    checksum = zlib.crc32(STATE["fc.weight"].numpy().tobytes()).to_bytes(4, "little")
    assert content.count(checksum) == 2  # behind the member, and in the directory
    saved.write_bytes(content.replace(checksum, bytes(4)))
    with pytest.raises(DataError, match="checksum mismatch"):
        load_checkpoint(saved)


def test_every_byte_is_looked_at_in_blocks_that_a_signal_can_end(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "a.pt")
    done: list[int] = []

    class Counted:
        def task(self, name: str, total: int) -> Counted:
            done.append(-total)
            return self

        def advance(self, amount: int = 1, note: str = "") -> None:
            done.append(amount)

    with open(tmp_path / "a.pt", "rb") as stream:
        assert check_checksums(stream, Counted())
    assert sum(done) == 0
    assert max(done) <= 1 << 20


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_damaged_checkpoint_is_one_line_and_65(cli: Cli, saved: Path, command: str) -> None:
    path = flipped(saved, content_positions(saved)[-100], 3)
    done = cli(command, path, *([saved.with_name("out.safetensors")] if command == "convert" else []))
    assert (done.code, done.stdout) == (65, "")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
    assert not saved.with_name("out.safetensors").exists()


def test_a_failure_of_the_disk_is_not_called_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(zipfile.ZipExtFile, "read", fail)
    with pytest.raises(BnnError, match="Input/output error") as caught:
        load_checkpoint(saved)
    assert (caught.value.exit, caught.value.code) == (74, "read_failed")
