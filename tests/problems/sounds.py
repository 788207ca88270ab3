"""Clips of sound, and files of them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from scipy.io import wavfile

SECONDS = (0.1, 3.0, 1.0, 0.55, 1.0, 2.2, 0.1)
CLASSES = ("better", "same", "worse")


def clip(seconds: float, rate: int = 16_000, *, pitch: float = 300.0) -> np.ndarray:
    """A tone with some noise (T,), float32."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(round(1000 * seconds)).normal(size=len(times))
    return (0.4 * np.sin(2 * np.pi * pitch * times) + 0.05 * noise).astype(np.float32)


def clips() -> list[np.ndarray]:
    """Of very different lengths, some the same, at 16 kHz."""
    return [clip(seconds, pitch=200.0 + 150 * row) for row, seconds in enumerate(SECONDS)]


def encoded(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """The bytes of a WAV file."""
    stream = io.BytesIO()
    wavfile.write(stream, rate, samples)
    return stream.getvalue()


def write_clips(folder: Path) -> Path:
    """The clips, in a folder for each class."""
    for row, samples in enumerate(clips()):
        path = folder / CLASSES[row % 3] / f"{row}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(samples))
    return folder
