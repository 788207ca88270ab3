"""What a folder of `save_pretrained` brings to make inputs: its tokenizer, image processor or feature extractor, called as they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.data._sound import at_rate
from bnncli.data._transform import Transformed
from bnncli.errors import DataError, Untrusted
from bnncli.models._extra import part, require
from bnncli.models._hf_folder import PROCESSOR, TOKENIZER, feature_extractor, files_like
from bnncli.names import quoted
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.system.input_files import read_object

_LARGEST = 1 << 24  # a larger model_max_length is the library's way to say that there is none
# Positions are counted from behind the padding token's number.
_OFFSET_TYPES = {
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
}  # fmt: skip
_PARALLEL = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Texts:
    """A tokenizer: texts, or pairs of them, padded to the longest of a batch and cut at `max_length` tokens; None never cuts.

    Where it has no token for padding, the network sees each text by itself.
    """

    folder: str
    digest: str
    max_length: int | None
    takes: str = "texts"
    mode: str = ""

    def __call__(self, items: Sequence[Any]) -> Transformed:
        """Token ids and what goes with them, (n, length) int64 by name, and how many texts were cut."""
        _settle_threads()
        tokenizer = _loaded("AutoTokenizer", self.folder, self.digest)
        texts: tuple[list[str], ...] = (list(items),)
        if items and not isinstance(items[0], str):
            texts = [first for first, _ in items], [second for _, second in items]
        cut = {"truncation": True, "max_length": self.max_length} if self.max_length is not None else {}
        has_padding = tokenizer.pad_token_id is not None
        found = tokenizer(*texts, padding=has_padding, **cut)
        lengths = None if has_padding else tuple(map(len, found["input_ids"]))
        inputs = {
            name: np.asarray(rows, np.int64) if has_padding else _padded([np.asarray([row], np.int64) for row in rows])
            for name, rows in found.items()
        }
        num_truncated = 0
        if self.max_length is not None and tokenizer.is_fast:
            num_truncated = sum(bool(one.overflowing) for one in found.encodings)
        elif self.max_length is not None:
            whole = tokenizer(*texts, truncation=False, verbose=False)["input_ids"]
            num_truncated = sum(len(one) > self.max_length for one in whole)
        return Transformed(inputs, num_truncated, lengths=lengths)

    @property
    def pad_token_id(self) -> int | None:
        """The token that texts are padded with; None where there is none."""
        _settle_threads()
        found = _loaded("AutoTokenizer", self.folder, self.digest).pad_token_id
        return None if found is None else int(found)

    def to_json(self) -> dict[str, Any]:
        """The digest of the tokenizer's files, and where texts are cut."""
        return {"tokenizer": self.digest, "max_length": self.max_length}


@dataclass(frozen=True)
class Images:
    """An image processor: whatever resizing, cropping, scaling and normalising it does."""

    folder: str
    digest: str
    mode: str
    backend: str
    takes: str = "images"

    def __call__(self, items: Sequence[Any]) -> Transformed:
        """Pixels (n, C, H, W) float32, and what goes with them, by name; photographs are turned upright, as the library's load_image does."""
        from PIL import ImageOps  # here, for its time

        processor = _loaded("AutoImageProcessor", self.folder, self.digest)
        found = processor(images=[ImageOps.exif_transpose(item) for item in items], return_tensors="pt")
        return Transformed({name: tensor.numpy() for name, tensor in found.items()})

    def to_json(self) -> dict[str, Any]:
        """The digest of the processor's files, and the library that resizes: they round differently."""
        return {"image_processor": self.digest, "mode": self.mode, "backend": self.backend}


@dataclass(frozen=True)
class Sounds:
    """A feature extractor: each clip is resampled to its rate, and given to it by itself.

    Attributes:
        rate: in Hz.
        min_length: samples that the network needs.
        max_length: samples, what is behind them is cut; None never cuts.
        backend: the library that makes its spectra, where the result depends on what is installed.
    """

    folder: str
    digest: str
    rate: int
    min_length: int
    max_length: int | None
    backend: str | None
    takes: str = "audio"
    mode: str = ""

    def __call__(self, items: Sequence[Any]) -> Transformed:
        """What the network takes, by name: (n, T) waves or (n, T, bins) spectra, with zeros behind the shorter ones."""
        extractor = _loaded("AutoFeatureExtractor", self.folder, self.digest)
        found, num_truncated = [], 0
        for sound in items:
            samples = at_rate(sound, self.rate)
            if len(samples) < self.min_length:
                what = f"got {len(samples)} samples at {self.rate:,} Hz, expected at least {self.min_length}"
                raise DataError(f"{sound.where} is too short for the model: {what}", code="empty_clip")
            num_truncated += self.max_length is not None and len(samples) > self.max_length
            found.append(extractor(samples, sampling_rate=self.rate, return_tensors="np"))
        num_converted = sum(sound.rate != self.rate or sound.num_channels > 1 for sound in items)
        inputs = {name: _padded([np.asarray(one[name]) for one in found]) for name in found[0]}
        lengths = tuple(next(iter(one.values())).shape[1] for one in found)
        return Transformed(inputs, num_truncated, num_converted, lengths)

    def to_json(self) -> dict[str, Any]:
        """The digest of the extractor's files, and what is done before it."""
        own = {"feature_extractor": self.digest, "sampling_rate": self.rate, "max_length": self.max_length}
        made = {"resampling": "scipy.signal.resample_poly", "channels": "mean"}
        return {**own, **made, **({} if self.backend is None else {"backend": self.backend})}


def inputs_of(folder: Path, kind: str, config: Mapping[str, Any]) -> Texts | Images | Sounds | None:
    """What makes the inputs of a model of Sequence, Image or Audio; None where the folder has nothing for that."""
    if kind == "Audio":
        return audio_inputs(folder, config)
    return text_inputs(folder, config) if kind == "Sequence" else image_inputs(folder, config)


def audio_inputs(folder: Path, config: Mapping[str, Any]) -> Sounds | None:
    """The feature extractor of a folder; None where it has none."""
    own = feature_extractor(folder)
    if own is None:
        return None
    rate = own["sampling_rate"]
    if not isinstance(rate, int) or rate < 1:
        message = (
            f"{quoted(folder, limit=300)}: its feature extractor has sampling_rate {quoted(rate)}, expected an "
            "integer in Hz"
        )
        raise DataError(message, path=folder)
    is_kaldi = own.get("feature_extractor_type") == "ASTFeatureExtractor"
    backend = ("torchaudio" if find_spec("torchaudio") is not None else "numpy") if is_kaldi else None
    digest = _digest(files_like(folder, PROCESSOR))
    return Sounds(str(folder.absolute()), digest, rate, _fewest_samples(own, config), _most_samples(own, rate), backend)


def _fewest_samples(own: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Samples of the first spectrum, or those that a network's convolutions make one position of."""
    if own.get("feature_extractor_type") in ("ASTFeatureExtractor", "SeamlessM4TFeatureExtractor"):
        return 400
    kernels, strides = config.get("conv_kernel"), config.get("conv_stride")
    if not isinstance(kernels, list) or not isinstance(strides, list):
        return 1
    found = int(config.get("squeeze_factor", 1))  # positions that are taken as one
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=False):
        found = (found - 1) * stride + kernel
    return found


def _most_samples(own: Mapping[str, Any], rate: int) -> int | None:
    """Samples behind which a feature extractor cuts, of the two that do; None for others, whatever `max_length` they were given.

    Whisper's takes `n_samples`; AST's `max_length` spectra of 400 samples, one each 160.
    """
    kind, frames = own.get("feature_extractor_type"), own.get("max_length")
    if kind == "WhisperFeatureExtractor":
        return int(own.get("chunk_length", 30)) * rate
    if kind == "ASTFeatureExtractor" and isinstance(frames, int):
        return 400 + frames * 160 - 1
    return None


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays (1, T, ...) as one (n, longest T, ...), with zeros behind the shorter ones."""
    first = arrays[0]
    if first.ndim < 2:
        return np.concatenate(arrays)
    padded = np.zeros((len(arrays), max(one.shape[1] for one in arrays), *first.shape[2:]), first.dtype)
    for row, one in zip(padded, arrays, strict=True):
        row[: one.shape[1]] = one[0]
    return padded


def text_inputs(folder: Path, config: Mapping[str, Any]) -> Texts | None:
    """The tokenizer of a folder; None where it has none."""
    files = files_like(folder, TOKENIZER)
    if not files:
        return None
    own = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    limits = [own.get("model_max_length"), _positions(config)]
    lengths = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < _LARGEST]
    return Texts(str(folder.absolute()), _digest(files), min(lengths, default=None))


def image_inputs(folder: Path, config: Mapping[str, Any]) -> Images | None:
    """The image processor of a folder; None where it has none."""
    files = files_like(folder, PROCESSOR)
    if not files:
        return None
    mode = "L" if config.get("num_channels") == 1 else "RGB"
    backend = "torchvision" if find_spec("torchvision") is not None else "pil"
    return Images(str(folder.absolute()), _digest(files), mode, backend)


def _positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model has positions for; None where it counts from a token to another."""
    if config.get("model_type") in ("gpt2", "openai-gpt", "ctrl"):
        return config.get("n_positions")
    number = config.get("max_position_embeddings")
    if number is not None and config.get("model_type") in _OFFSET_TYPES:
        return int(number) - int(config.get("pad_token_id") or 0) - 1
    return number


def _digest(files: Sequence[Path]) -> str:
    return f"sha256:{json_sha256([[file.name, file_sha256(file)] for file in files])}"


@lru_cache(maxsize=4)
def _loaded(auto: str, folder: str, digest: str) -> Any:
    """The tokenizer, image processor or feature extractor of a folder whose files have this digest.

    Raises:
        DataError: the library cannot make it of the folder's files.
        Untrusted: it is code in the folder.
    """
    maker = part(require("transformers", extra="hf"), auto, extra="hf")
    try:
        return maker.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's own, of what is in the files
        why = " ".join(str(error).split())[:200]
        what = {"AutoTokenizer": "tokenizer", "AutoFeatureExtractor": "feature extractor"}.get(auto, "image processor")
        if "trust_remote_code" in why or "custom code" in why:
            raise Untrusted(
                f"{quoted(folder, limit=300)}: its {what} is defined by code in the folder (auto_map), which "
                "bnncli never runs",
                path=folder,
            ) from error
        raise DataError(f"{quoted(folder, limit=300)}: cannot load its {what}: {why}", path=folder) from error


def _settle_threads() -> None:
    """Threads in this process; none in one that reads ahead beside others, where the library would deadlock or complain."""
    import torch.utils.data

    if torch.utils.data.get_worker_info() is not None:
        os.environ[_PARALLEL] = "false"
    else:
        os.environ.setdefault(_PARALLEL, "true")
