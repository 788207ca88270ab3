"""Read sound from encoded files (WAV with scipy, other formats with soundfile) and from arrays of samples."""

from __future__ import annotations

import importlib
import io
import math
import os
import struct
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bnncli.data.arrays import with_known
from bnncli.data.labels import check_labels
from bnncli.errors import UNREADABLE, DataError, UsageError
from bnncli.names import quote_name
from bnncli.progress import Progress
from bnncli.system.input_files import open_regular

SUFFIXES = {".wav", ".wave", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff"}
_WAV = {".wav", ".wave"}
_HIGHEST_RATE = 1_000_000  # beyond any converter


class Sound(NamedTuple):
    """A clip.

    Attributes:
        samples: (T,) float32, mean over channels.
        rate: sampling rate in Hz.
        num_channels: original number of channels.
        where: name for messages.
    """

    samples: np.ndarray
    rate: int
    num_channels: int = 1
    where: str = "a clip"


def check_decodable(names: Iterable[str]) -> None:
    """Raise UsageError if files with these names need a library that is not installed."""
    if find_spec("soundfile") is None:
        for name in names:
            if os.path.splitext(name)[1].lower() in SUFFIXES - _WAV:
                raise _missing_library_error(f"to decode {quote_name(name)}")


def decode_sound(data: bytes, where: str, path: Path | None = None) -> Sound:
    """Decode the sound in a file's bytes.

    Args:
        where: name for messages.

    Raises:
        DataError: it is not sound, is truncated, or has no samples.
        UsageError: the library that decodes it is not installed.
    """
    found = _read_wav(data, where, path) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else None
    return check_sound(*(_read_with_library(data, where, path) if found is None else found), where, path)


def read_sound(path: Path) -> Sound:
    """Read the sound of a file; raises as `decoded` and `open_regular` do."""
    with open_regular(path) as stream:
        return decode_sound(stream.read(), quote_name(path, limit=300), path)


def check_sound(samples: np.ndarray, rate: int, where: str, path: Path | None = None) -> Sound:
    """Check samples (T,) or (T, channels), integer or real, and return them as a sound.

    Raises:
        DataError: there are none, one is not finite, or the rate is implausible.
    """
    if samples.ndim not in (1, 2) or samples.size == 0:
        raise DataError(f"{where} has no samples", code="empty_clip", path=path)
    if not 1 <= rate <= _HIGHEST_RATE:
        raise DataError(f"{where}: expected a sampling rate from 1 to {_HIGHEST_RATE:,} Hz, got {rate:,} Hz", path=path)
    scaled = _scale_samples(samples).reshape(len(samples), -1)
    if not np.isfinite(scaled).all():
        raise DataError(f"{where} has samples that are NaN or infinite", code="not_finite", path=path)
    num_channels = scaled.shape[1]
    return Sound(scaled[:, 0].copy() if num_channels == 1 else scaled.mean(axis=1), int(rate), num_channels, where)


def is_clip(value: object) -> bool:
    """Return whether a value is sound in the form of Hugging Face datasets: a mapping with `array` and `sampling_rate`."""
    return isinstance(value, Mapping) and {"array", "sampling_rate"} <= value.keys()


def convert_clip(value: Mapping[str, Any], where: str) -> Sound:
    """Convert a value recognised by `is_clip`. Raises DataError if it is not a wave (T,) with a rate in Hz."""
    try:
        samples, rate = np.asarray(value["array"]), float(value["sampling_rate"])
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: expected an array of samples and a sampling rate in Hz ({error})") from error
    if samples.ndim != 1 or samples.dtype.kind not in "fi" or rate != int(rate):
        came = f"{samples.dtype} of shape {samples.shape} at {rate:g} Hz"
        raise DataError(f"{where}: expected mono samples (T,) and an integer sampling rate in Hz, got {came}")
    return check_sound(samples, int(rate), where)


def resample(sound: Sound, rate: int) -> np.ndarray:
    """Resample to (T',) float32 at another rate in Hz with a polyphase filter (scipy.signal.resample_poly)."""
    if sound.rate == rate:
        return sound.samples
    from scipy.signal import resample_poly  # slow import

    common = math.gcd(rate, sound.rate)
    return np.asarray(resample_poly(sound.samples, rate // common, sound.rate // common), np.float32)


def _scale_samples(samples: np.ndarray) -> np.ndarray:
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    if samples.dtype.kind == "i":
        return (samples / 2.0 ** (8 * samples.dtype.itemsize - 1)).astype(np.float32)
    return samples.astype(np.float32)


def _read_wav(data: bytes, where: str, path: Path | None) -> tuple[np.ndarray, int] | None:
    """Return samples (T,) or (T, channels) as stored, and their rate; None if encoded otherwise. Raises DataError."""
    from scipy.io import wavfile  # slow import

    if data[4:8] == bytes(4):  # the size of a stream, not known when it began
        data = data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wavfile.WavFileWarning)
        warnings.filterwarnings("error", "Reached EOF prematurely", wavfile.WavFileWarning)
        try:
            rate, samples = wavfile.read(io.BytesIO(data))
        except (ValueError, TypeError, struct.error, ZeroDivisionError, wavfile.WavFileWarning) as error:
            if "Unknown wave file format" in str(error) or "Unsupported bit depth" in str(error):
                return None
            raise _damage_error(where, " ".join(str(error).split())[:200], path) from error
        except UnboundLocalError as error:  # of scipy's variables, if the file has no such part
            raise _damage_error(where, "it has no samples, or no format header", path) from error
    return samples, rate


def _read_with_library(data: bytes, where: str, path: Path | None) -> tuple[np.ndarray, int]:
    """Return samples (T, channels) and rate of any format of libsndfile. Raises DataError, UsageError."""
    try:
        library: Any = importlib.import_module("soundfile")
    except ImportError:
        raise _missing_library_error(f"to decode {where}, which is not a plain WAV file") from None
    except OSError as error:  # raised by libsndfile itself
        raise _missing_library_error(f"to decode {where}", f"cannot be imported ({error})") from error
    try:
        samples, rate = library.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (library.SoundFileError, ValueError, TypeError) as error:
        why = getattr(error, "error_string", str(error))  # without the address of the stream
        raise _damage_error(where, " ".join(why.split())[:200], path) from error
    return samples, rate


def _missing_library_error(purpose: str, why: str = "is not installed") -> UsageError:
    message = f"soundfile is needed {purpose}, but {why}"
    return UsageError(message, code="missing_library", hint="pip install 'bnncli[audio]', or convert the files to WAV")


def _damage_error(where: str, why: str, path: Path | None) -> DataError:
    return DataError(f"cannot decode {where}: {why}", code=UNREADABLE, path=path)


_MOST_CHANNELS = 8


@dataclass(frozen=True, eq=False)
class WaveDataset:
    """Waves (rows, T) or (rows, T, channels) at one sampling rate in Hz, in their stored type."""

    waves: np.ndarray
    rate: int
    labels: np.ndarray | None
    classes: None = None
    is_sized: bool = False
    names: None = None
    items: str = "audio"
    groups: np.ndarray | None = None

    @property
    def is_labeled(self) -> bool:
        """Return whether there are labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.waves)

    def read(self, rows: np.ndarray) -> tuple[list[Sound], np.ndarray | None]:
        """Return clips and labels (n,) of the rows."""
        found = [check_sound(self.waves[row], self.rate, f"row {row}") for row in rows.tolist()]
        return found, None if self.labels is None else self.labels[rows]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return the arrays themselves, the rate, and the rows."""
        found = {"x": self.waves, "sampling_rate": np.array([self.rate]), "rows": rows}
        return with_known(found, y=self.labels, groups=self.groups)


def is_waves(array: np.ndarray) -> bool:
    """Return whether an array holds waves rather than spectra."""
    has_channels = array.ndim == 3 and array.shape[2] <= _MOST_CHANNELS
    return array.dtype.kind in "if" and (array.ndim == 2 or has_channels)


def wave_dataset(waves: np.ndarray, labels: np.ndarray | None, rate: int, *, where: str) -> WaveDataset:
    """Check waves and return them as a data set. Raises DataError for waves without samples or labels that break a rule."""
    if len(waves):
        check_sound(waves[0], rate, where)
    known = None if labels is None else check_labels(labels, num_rows=len(waves), where=where)
    return WaveDataset(waves, rate, known)
