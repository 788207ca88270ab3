"""Sound files decoded as other readers do, resampled as the wave itself says, and refused in a line where they are damaged."""

from __future__ import annotations

import io
import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from problems.sounds import clip, clips, encoded, write_clips
from pyarrow import parquet as pq

from bnncli.data import sound
from bnncli.data.pixels import Preprocess
from bnncli.data.sound import Sound, resample
from bnncli.data.splits import load_split
from bnncli.data.transform import TransformedInputs
from bnncli.errors import BnnError, DataError, MissingInput, UsageError

pytestmark = [pytest.mark.core, pytest.mark.libraries]

LONG = clip(0.2)


class Heard:
    """A model's feature extractor that takes clips as they are."""

    takes, mode = "audio", ""

    def __call__(self, items: list[Sound]) -> TransformedInputs:
        return TransformedInputs(np.stack([item.samples for item in items]))

    def to_json(self) -> dict[str, Any]:
        return {}


HEARD = Preprocess(transform=Heard())


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_whole_numbers_are_decoded_as_they_were_written(bits: int) -> None:
    own = np.array([[-1.0, 0.5], [0.25, 1 - 2.0 ** (1 - bits)], [0.0, -0.5]])
    whole = np.round(own * 2 ** (bits - 1)).astype(np.int64) + (128 if bits == 8 else 0)
    stream = io.BytesIO()
    with wave.open(stream, "wb") as out:
        out.setparams((2, bits // 8, 8000, 0, "NONE", ""))
        out.writeframes(b"".join(int(value).to_bytes(bits // 8, "little", signed=bits > 8) for value in whole.ravel()))
    found = sound.decode_sound(stream.getvalue(), "it")
    assert (found.rate, found.num_channels, found.samples.dtype) == (8000, 2, np.float32)
    np.testing.assert_allclose(found.samples, own.mean(axis=1), atol=1e-7)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_real_numbers_are_decoded_as_they_are(dtype: str) -> None:
    found = sound.decode_sound(encoded(LONG.astype(dtype), 22_050), "it")
    assert (found.rate, found.num_channels) == (22_050, 1)
    np.testing.assert_array_equal(found.samples, LONG)


def test_a_streamed_file_ends_where_its_bytes_do_and_other_parts_are_passed_over() -> None:
    whole = encoded(LONG)
    place = whole.index(b"data")
    odd = whole[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + whole[12:place]
    found = sound.decode_sound(odd + b"data" + struct.pack("<I", 0xFFFFFFFF) + whole[place + 8 :], "it")
    np.testing.assert_array_equal(found.samples, LONG)


@pytest.mark.parametrize("rate", [44_100, 8_000, 11_025])
def test_a_resampled_tone_is_that_tone(rate: int) -> None:
    def tone(own: int) -> np.ndarray:
        return np.sin(2 * np.pi * 440 * np.arange(own // 5) / own).astype(np.float32)

    found = resample(Sound(tone(rate), rate), 16_000)
    assert (len(found), found.dtype) == (3_200, np.float32)
    np.testing.assert_allclose(found[200:-200], tone(16_000)[200:-200], atol=2e-3)


def header(code: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16) -> bytes:
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", code, channels, rate, rate * width % 2**32, width, bits)
    return (
        b"RIFF"
        + struct.pack("<I", 44)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", 8)
        + bytes(8)
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encoded(LONG)[:-100], "finished at 12758 bytes, expected 12858 bytes"),
        (encoded(LONG)[:30], "unpack requires a buffer"),
        (encoded(LONG[:0]), "it has no samples"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "No fmt chunk before data"),
        (header(channels=0), "division or modulo by zero"),
        (header(code=3, bits=24).replace(b"\x18\0data", b"\x20\0data"), "data type '<f3' not understood"),
        (encoded(np.full(9, np.nan, np.float32)), "has samples that are NaN or infinite"),
        (header(rate=0), "got 0 Hz"),
        (header(rate=2_000_000), "got 2,000,000 Hz"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_a_line(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as told:
        sound.decode_sound(data, "it")
    assert "\n" not in told.value.message


def test_other_codings_need_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "find_spec", lambda name: None)
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    for read in (
        lambda: load_split(f"audio:{tmp_path}", preprocess=HEARD),
        lambda: sound.decode_sound(header(code=6), "it"),
    ):
        with pytest.raises(UsageError, match=r"^soundfile is needed to decode .*, but is not installed$") as told:
            read()
        assert "pip install 'bnncli[audio]'" in str(told.value.hint)


@pytest.mark.parametrize("suffix", ["flac", "ogg", "wav"])
def test_the_library_decodes_what_we_do_not(tmp_path: Path, suffix: str) -> None:
    library = pytest.importorskip("soundfile")
    library.write(tmp_path / f"a.{suffix}", LONG, 16_000, **({"subtype": "ULAW"} if suffix == "wav" else {}))
    ((found,), _) = load_split(f"audio:{tmp_path}", preprocess=HEARD).dataset.read(np.array([0]))
    assert (found.rate, len(found.samples)) == (16_000, len(LONG))
    assert np.abs(found.samples - LONG).mean() < 0.02
    (tmp_path / f"a.{suffix}").write_bytes(b"OggS" + bytes(100))
    with pytest.raises(DataError, match=r"cannot decode [^<>]*$"):  # without the address of an object
        load_split(f"audio:{tmp_path}", preprocess=HEARD).dataset.read(np.array([0]))


def test_folders_are_classes_and_a_flat_folder_has_none(tmp_path: Path) -> None:
    split = load_split(f"audio:{write_clips(tmp_path / 'train')}@5", name="train", preprocess=HEARD)
    assert (split.classes, split.labels.tolist()) == (("better", "same", "worse"), [0, 0, 0, 1, 1])  # type: ignore[union-attr]
    assert split.names == ["better/0.wav", "better/3.wav", "better/6.wav", "same/1.wav", "same/4.wav"]
    flat = load_split(f"audio:{tmp_path / 'train' / 'same'}", preprocess=HEARD)
    assert (flat.labels, flat.classes, flat.names) == (None, None, ["1.wav", "4.wav"])
    before = flat.content_digest()
    (tmp_path / "train/same/1.wav").write_bytes(encoded(LONG))
    assert load_split(f"audio:{tmp_path / 'train' / 'same'}", preprocess=HEARD).content_digest() != before


def rows_of(spec: str) -> list[Sound]:
    split = load_split(spec, preprocess=HEARD)
    assert (split.items, split.labels.tolist()) == ("audio", [0, 1, 2])  # type: ignore[union-attr]
    found = split.dataset.read(np.arange(3))[0]
    return found


def test_every_kind_gives_the_same_clips(tmp_path: Path) -> None:
    waves = [(samples[:1600] * 32_767).astype(np.int16) for samples in clips()[:3]]
    for row, samples in enumerate(waves):
        (tmp_path / f"{row}.wav").write_bytes(encoded(samples))
    (tmp_path / "a.csv").write_text("path,label\n" + "".join(f"{row}.wav,{row}\n" for row in range(3)))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"sound": {"path": f"{row}.wav", "bytes": None}, "label": row}) + "\n" for row in range(3))
    )
    np.savez(tmp_path / "a.npz", x=np.stack(waves), y=np.arange(3), sampling_rate=16_000)
    named = [f"csv:{tmp_path / 'a.csv'}", f"csv:{tmp_path / 'a.csv'}:audio=path,label=label"]
    for spec in (*named, f"jsonl:{tmp_path / 'a.jsonl'}", f"npz:{tmp_path / 'a.npz'}"):
        for found, samples in zip(rows_of(spec), waves, strict=True):
            assert (found.rate, found.num_channels) == (16_000, 1)
            np.testing.assert_array_equal(found.samples, samples.astype(np.float32) / 32_768)


def test_a_column_of_encoded_clips_is_read(tmp_path: Path) -> None:
    rows = [{"bytes": encoded(samples), "path": "no-such.wav"} for samples in clips()[:3]]
    pq.write_table(pa.table({"audio": rows, "label": [0, 1, 2]}), tmp_path / "a.parquet")
    for found, samples in zip(rows_of(f"parquet:{tmp_path / 'a.parquet'}"), clips(), strict=False):
        np.testing.assert_array_equal(found.samples, samples)


CODE = """
import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq
class Data:
    def __len__(self):
        return 3
    def __getitem__(self, row):
        clip = {"array": np.full(4, 0.25 * row), "sampling_rate": 16_000}
        return {"audio": clip, "label": row} if row < 2 else ({"array": np.zeros((2, 4)), "sampling_rate": 16_000}, row)
"""


def test_a_dataset_gives_clips_as_others_do(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(CODE)
    split = load_split(f"py:{tmp_path / 'data.py'}:Data", preprocess=HEARD)
    found, labels = split.dataset.read(np.arange(2))
    assert (split.items, labels.tolist()) == ("audio", [0, 1])  # type: ignore[union-attr]
    assert [(one.samples.tolist(), one.rate) for one in found] == [([0.0] * 4, 16_000), ([0.25] * 4, 16_000)]
    with pytest.raises(
        DataError, match=r"row 2: expected mono samples \(T,\) and an integer sampling rate in Hz, got float64 of"
    ):
        split.dataset.read(np.array([2]))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("npz:unsaid.npz", DataError, "'unsaid.npz' does not give the sampling rate of its audio"),
        ("npz:odd.npz", DataError, "sampling_rate is .*, expected an integer number of Hz"),
        ("audio:empty", DataError, "no audio files in empty"),
        ("audio:none", MissingInput, "no folder 'none'"),
        ("csv:a.csv", MissingInput, "no file 'gone.wav'"),
        ("csv:b.csv:audio=text", MissingInput, "no file 'gone'"),
        ("csv:b.csv", UsageError, "'b.csv': found no audio column"),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, error: type[BnnError], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("unsaid.npz", x=np.zeros((2, 9), np.float32))
    np.savez("odd.npz", x=np.zeros((2, 9), np.float32), sampling_rate=0.5)
    Path("empty").mkdir()
    Path("a.csv").write_text("path,label\ngone.wav,0\n")
    Path("b.csv").write_text("text,label\ngone,0\n")
    with pytest.raises(error, match=message) as told:
        load_split(spec, preprocess=HEARD).dataset.read(np.array([0]))
    assert "\n" not in told.value.message


def test_sound_needs_a_model_that_hears(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(encoded(LONG))
    with pytest.raises(UsageError, match="the data are audio, but the model has no feature extractor"):
        load_split(f"audio:{tmp_path}")
