"""Small files that claim to be large: refused by their headers, and never read further than these say."""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from problems.command_line import Cli

from bnncli.data import arrays

ZEROS = 1 << 25  # of which gzip makes 33 kB
MOST = 1 << 22  # that refusing may take


def idx(*shape: int, code: int = 8) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, code, len(shape), *shape)


def zipped(header: bytes, size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = bytes(1 << 20)
    return packer.compress(header) + b"".join(packer.compress(block) for _ in range(size >> 20)) + packer.flush()


def npy(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def npz(path: Path, content: bytes, compression: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", content)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def extract(cli: Cli, folder: Path, spec: str) -> Any:
    words = ("extract-features", folder / "run", "--model", "flatten", "--data", f"train={spec}", "--json")
    tracemalloc.start()
    done = cli(*words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "Traceback" not in done.stderr
    assert not (folder / "run.bnn").exists()
    assert peak < 4 * MOST
    return done


IDX = {
    "expands beyond its header": (idx(10, 28, 28), ZEROS, "there are more"),
    "a size that its bytes cannot hold": (idx(60_000, 28, 28), 0, "compressed"),
    "sizes whose product is absurd": (idx(*[(1 << 32) - 1] * 8), ZEROS, "compressed"),
    "axes without end": (idx(*[1] * 200), 0, "its header has 200 axes"),
}


@pytest.mark.parametrize("case", IDX)
def test_a_gzipped_idx_file_is_read_no_further_than_its_header_says(cli: Cli, tmp_path: Path, case: str) -> None:
    header, size, said = IDX[case]
    (tmp_path / "a.gz").write_bytes(zipped(header, size))
    done = extract(cli, tmp_path, f"idx:{tmp_path}/a.gz")
    assert (done.code, said in done.json["error"]["message"]) == (65, True), done.stderr


def test_an_idx_file_without_gzip_is_judged_by_its_size(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(idx(1 << 31, 4) + bytes(100))
    done = extract(cli, tmp_path, f"idx:{tmp_path}/a")
    assert (done.code, "there are 100" in done.json["error"]["message"]) == (65, True)


NPZ = {
    "a shape beyond the bytes": (npy((1 << 40, 4)) + bytes(64), "does not match"),
    "negative sizes": (npy((-4, -4)) + bytes(64), "damaged"),
    "a type of absurd width": (npy((2, 2), "<U99999999") + bytes(64), "does not match"),
    "a header without end": (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(64), "damaged"),
    "more axes than an array has": (npy((1,) * 200) + bytes(4), "damaged"),
}


@pytest.mark.parametrize("case", NPZ)
def test_an_npz_file_with_an_absurd_header_is_refused(cli: Cli, tmp_path: Path, case: str) -> None:
    content, said = NPZ[case]
    npz(tmp_path / "a.npz", content)
    done = extract(cli, tmp_path, f"npz:{tmp_path}/a.npz")
    assert (done.code, said in done.json["error"]["message"]) == (65, True), done.stderr


@pytest.mark.parametrize("form", ["npz", "idx"])
def test_an_array_beyond_the_free_memory_is_69_before_it_is_read(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(arrays, "available_memory", lambda device: 1 << 20)
    if form == "npz":
        npz(tmp_path / "a", npy((1 << 20, 4)) + bytes(1 << 24))
    else:
        (tmp_path / "a").write_bytes(zipped(idx(1 << 24, 1), 1 << 24))
    done = extract(cli, tmp_path, f"{form}:{tmp_path}/a")
    assert (done.code, done.json["error"]["code"]) == (69, "out_of_memory")
    assert "1 MiB of memory are free" in done.json["error"]["message"]


@pytest.mark.parametrize("size", [(60_000, 60_000), (1 << 31, 1), (0, 0)])
def test_an_image_that_claims_more_pixels_than_any_camera_is_refused(
    cli: Cli, tmp_path: Path, size: tuple[int, int]
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png(*size))
    done = extract(cli, tmp_path, f"images:{tmp_path}/images")
    assert (done.code, "cannot decode 'a.png'" in done.json["error"]["message"]) == (65, True), done.stderr


HEADERS = {
    "a length beyond the file": struct.pack("<Q", 1 << 60) + b"{}",
    "nothing but a length": struct.pack("<Q", 90_000_000) + b"{" + bytes(100),
    "an absurd shape": json.dumps(
        {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}
    ).encode(),
    "a negative size": json.dumps({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode(),
    "offsets backwards": json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}).encode(),
    "an offset beyond every number": json.dumps(
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**400]}}
    ).encode(),
    "no offsets": json.dumps({"x": {"dtype": "F32", "shape": [1]}}).encode(),
    "an unknown type": json.dumps({"x": {"dtype": "F999", "shape": [1], "data_offsets": [0, 4]}}).encode(),
    "lists in lists": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_safetensors_file_with_an_absurd_header_is_refused(cli: Cli, tmp_path: Path, case: str) -> None:
    header = HEADERS[case]
    if header.startswith(b"{"):
        header = struct.pack("<Q", len(header)) + header
    (tmp_path / "a.pt").write_bytes(header + bytes(4))
    for command in ("inspect", "verify"):
        done = cli(command, tmp_path / "a.pt", "--json")
        assert done.code == 65, done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr) < 1000


def test_a_tensor_that_one_number_stands_for_is_no_checkpoint(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(10**12)}, tmp_path / "a.pt")
    done = cli("inspect", tmp_path / "a.pt", "--json")
    assert (done.code, "claim" in done.json["error"]["message"]) == (65, True), done.stderr
    torch.save({"w": torch.zeros(1).expand(10**5), "v": torch.ones(10**5)}, tmp_path / "a.pt")
    assert cli("inspect", tmp_path / "a.pt").code == 0


def test_gzip_that_is_cut_off_or_has_a_wrong_checksum_is_refused(cli: Cli, tmp_path: Path) -> None:
    whole = gzip.compress(idx(10, 10) + bytes(range(100)))
    for content in (whole[:-12], whole[:-6] + bytes(6)):
        (tmp_path / "a.gz").write_bytes(content)
        assert extract(cli, tmp_path, f"idx:{tmp_path}/a.gz").code == 65
