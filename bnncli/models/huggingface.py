"""Folders of `save_pretrained`: their contents, tokenizers and processors, and strictly loaded networks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.data.sound import resample
from bnncli.data.transform import TransformedInputs
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted
from bnncli.lazy import torch
from bnncli.models.checkpoints import check_finite, load_checkpoint
from bnncli.models.libraries import library_attribute, require
from bnncli.models.sharded import find_sharded_folder
from bnncli.names import format_names, quote_name
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.system.input_files import MAX_BYTES, open_regular, read_object

if TYPE_CHECKING:
    from torch import Tensor, nn


_NAME = "bnncli_plain"
_CHOOSE = "set_attn_implementation"


def use_plain_attention(network: nn.Module) -> nn.Module:
    """Return the network; its transformers modules compute attention masks independently of their values from now on."""
    for module in network.modules():
        if hasattr(module, _CHOOSE):
            _choose(module)
            break
    return network


def _choose(network: Any) -> None:
    transformers = require("transformers", extra="hf")
    masks = require("transformers.masking_utils", extra="hf")
    attention = require("transformers.integrations.sdpa_attention", extra="hf")

    def mask(*sizes: Any, **settings: Any) -> Any:
        return masks.sdpa_mask(
            *sizes, **{**settings, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )

    transformers.AttentionMaskInterface.register(_NAME, mask)
    transformers.AttentionInterface.register(_NAME, attention.sdpa_attention_forward)
    try:
        network.set_attn_implementation(_NAME)
    except (ValueError, ImportError):  # without that attention, use one that can be differentiated
        network.set_attn_implementation("eager")


CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"  # or NAME.index.json for shards
TOKENIZER = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.spm", "bpe.codes",
)  # fmt: skip
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
_CLASSIFIER = re.compile(r"\w+For(Sequence|Token|Image|Audio)Classification\w*")
_NO_NAME = re.compile(r"LABEL_\d+")
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PATIENCE = 30.0  # seconds for the first answer; the library would wait forever


def find_folder(place: str, *, option: str, allow_download: bool) -> Path:
    """Return the folder of a place; for a name on the Hugging Face Hub the local copy, downloaded if allowed.

    Raises:
        MissingInput: there is no such folder, or the download failed.
    """
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        hint = f"give the folder that contains it: {folder.parent}"
        raise MissingInput(
            f"{option}: {quote_name(folder, limit=300)} is a file, expected a folder", path=folder, hint=hint
        )
    if not allow_download or not _REPOSITORY.fullmatch(place):
        is_name = _REPOSITORY.fullmatch(place) and not allow_download
        hint = "give a local folder, or add \0allow_download\0 to fetch the model from the Hugging Face Hub"
        message = f"{option}: no folder {quote_name(folder, limit=300)}"
        raise MissingInput(message, path=folder, hint=hint if is_name else None)
    hub = require("huggingface_hub", extra="hf")
    wanted = ["*.json", "*.txt", "*.model", "*.spm", "*.safetensors"]
    try:
        with suppress(FileNotFoundError):  # not on this machine yet
            there = Path(hub.snapshot_download(place, allow_patterns=wanted, local_files_only=True))
            if next(there.glob("*.safetensors"), None) is not None:  # otherwise only a tokenizer or the like
                return there
        hub.model_info(place, timeout=_PATIENCE)
        return Path(hub.snapshot_download(place, allow_patterns=wanted))
    except Exception as error:  # of the library, the network or the disk
        why = " ".join(str(error).split())[:200]
        raise MissingInput(f"{option}: could not fetch {place!r}: {why}", path=folder) from error


def find_files_like(folder: Path, patterns: Iterable[str]) -> tuple[Path, ...]:
    """Return the sorted files of a folder whose names match one of the patterns."""
    return tuple(sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files with a model's weights: one, or an index and its shards; none without weights.

    Raises:
        MissingInput: a shard is missing.
        DataError: the index is damaged.
    """
    there = [name for one in (WEIGHTS, PICKLED) for name in (one, f"{one}.index.json") if (folder / name).is_file()]
    if not there or there[0] in (WEIGHTS, PICKLED):
        return tuple(folder / name for name in there[:1])
    index = folder / there[0]
    names = read_object(index).get("weight_map")
    shards = sorted({*names.values()}) if isinstance(names, dict) and all(map(_is_name, names.values())) else []
    if not shards:
        raise DataError(f"{quote_name(index, limit=300)} lists no weight files", path=index)
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        message = f"{quote_name(folder, limit=300)}: {len(missing)} of {len(shards)} weight files are missing: {format_names(missing)}"
        raise MissingInput(message, path=folder / missing[0], hint="copy or download all of them")
    return (index, *(folder / name for name in shards))


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor from a safetensors header. Raises MissingInput, or DataError if it is damaged."""
    with open_regular(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        raw = stream.read(length) if length <= MAX_BYTES else b""
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DataError(f"{quote_name(path, limit=300)} is truncated or damaged", code="truncated", path=path) from None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """Return the class that the model was saved from, from config.json."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def classifier_input_kind(architecture: str | None) -> str | None:
    """Return Sequence, Token, Image or Audio from a class name; None if it is not a classifier."""
    match = _CLASSIFIER.fullmatch(architecture) if architecture is not None else None
    return match[1] if match is not None else None


def kind_of(config: Mapping[str, Any], folder: Path) -> str:
    """Return Sequence, Token, Image or Audio: what the model classifies; many audio models are named after sequences.

    Raises:
        DataError: the model is not a classifier but a regression, or its weights are quantised.
    """
    name, where = architecture_of(config), quote_name(folder, limit=300)
    kind = classifier_input_kind(name)
    if kind is None:
        has = "config.json names no architecture" if name is None else f"the model is {quote_name(name)}"
        expected = "expected a sequence, token, image or audio classifier"
        raise DataError(f"{where}: {has}, {expected}", code="not_a_classifier", path=folder / CONFIG)
    check_plain(config, folder)
    return "Audio" if kind == "Sequence" and feature_extractor(folder) is not None else kind


def check_plain(config: Mapping[str, Any], folder: Path) -> None:
    """Check that a model is a classifier with plain weights. Raises DataError for a regression or quantised weights."""
    where = quote_name(folder, limit=300)
    if config.get("problem_type") == "regression":
        message = f"{where}: expected a classifier, got a regression model (problem_type regression)"
        raise DataError(message, code="regression", path=folder / CONFIG)
    if config.get("quantization_config") is not None:
        method = (
            config["quantization_config"].get("quant_method")
            if isinstance(config["quantization_config"], dict)
            else None
        )
        raise DataError(
            f"{where}: the weights are quantised ({method or 'quantization_config'}), which is not supported",
            code="quantised", path=folder / CONFIG, hint="save the model before quantisation, or after model.dequantize()",
        )  # fmt: skip


def feature_extractor(folder: Path) -> dict[str, Any] | None:
    """Return a folder's configuration of the feature extractor for sound; None if it has none."""
    for name in reversed(PROCESSOR):  # the library's order
        found = read_object(folder / name) if (folder / name).is_file() else {}
        for one in (found.get("feature_extractor"), found):
            if isinstance(one, dict) and "sampling_rate" in one:
                return one
    return None


def input_patterns(kind: str) -> tuple[str, ...]:
    """Return file name patterns of what prepares inputs, for models of Sequence, Token, Image or Audio."""
    return TOKENIZER if kind in ("Sequence", "Token") else PROCESSOR


def num_labels(config: Mapping[str, Any]) -> int:
    """Return the number of outputs of a classifier; the library's default is two."""
    names = config.get("id2label")
    return len(names) if isinstance(names, dict) else int(config.get("num_labels", 2))


def classes_of(config: Mapping[str, Any], folder: Path) -> tuple[str, ...] | None:
    """Return the class names of the outputs; None if config.json has none set by the user, or duplicates.

    Raises:
        DataError: id2label does not number its names 0, 1, 2, ...
    """
    names = config.get("id2label")
    if not isinstance(names, dict) or len(names) < 2:
        return None
    found = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(name, str | int) for name in found):
        message = f"{quote_name(folder / CONFIG, limit=300)}: the keys of id2label are not 0 to {len(names) - 1}"
        raise DataError(message, path=folder / CONFIG)
    texts = tuple(str(name) for name in found)
    is_named = len(set(texts)) == len(texts) and not all(map(_NO_NAME.fullmatch, texts))
    return texts if is_named else None


def task_of(config: Mapping[str, Any]) -> str | None:
    """Return multiclass, binary or multilabel; None if config.json does not say."""
    if num_labels(config) == 1:
        return "binary"
    of_types = {"single_label_classification": "multiclass", "multi_label_classification": "multilabel"}
    return of_types.get(str(config.get("problem_type")))


_LARGEST = 1 << 24  # a larger model_max_length means that there is none
# Positions are counted after the padding token's id.
_OFFSET_TYPES = {
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
}  # fmt: skip
_COUNTS_PADDING = {"gpt2", "gpt_neo", "openai-gpt"}  # positions, also those of padding on the left
_PARALLEL = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Texts:
    """A tokenizer for texts or pairs, padded to the longest of a batch and truncated at `max_length` tokens (None:

    never).

    Without a padding token, the network sees each text by itself.

    Attributes:
        is_right_padded: pad on the right although the tokenizer pads on the left.
    """

    folder: str
    digest: str
    max_length: int | None
    takes: str = "texts"
    mode: str = ""
    is_right_padded: bool = False

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return token ids and related inputs, (n, length) int64 by name, and the number of truncated texts."""
        tokenizer = load_tokenizer(self.folder, self.digest)
        texts: tuple[list[str], ...] = (list(items),)
        if items and not isinstance(items[0], str):
            texts = [first for first, _ in items], [second for _, second in items]
        has_padding = tokenizer.pad_token_id is not None
        side = {"padding_side": "right"} if self.is_right_padded else {}
        found, is_truncated = self.encode(*texts, padding=has_padding, **side)
        lengths = None if has_padding else tuple(map(len, found["input_ids"]))
        inputs = {
            name: np.asarray(rows, np.int64)
            if has_padding
            else _pad_clips([np.asarray([row], np.int64) for row in rows])
            for name, rows in found.items()
        }
        return TransformedInputs(inputs, sum(is_truncated), lengths=lengths)

    def encode(self, *texts: list[str], **settings: Any) -> tuple[Any, list[bool]]:
        """Return the tokenizer's result for texts or pairs, truncated, and which of them were truncated."""
        tokenizer = load_tokenizer(self.folder, self.digest)
        if self.max_length is None:
            return tokenizer(*texts, **settings), [False] * len(texts[0])
        found = tokenizer(*texts, truncation=True, max_length=self.max_length, **settings)
        if tokenizer.is_fast:
            return found, [bool(one.overflowing) for one in found.encodings]
        whole = tokenizer(*texts, truncation=False, verbose=False)["input_ids"]
        return found, [len(one) > self.max_length for one in whole]

    @property
    def pad_token_id(self) -> int | None:
        """The padding token; None if there is none."""
        found = load_tokenizer(self.folder, self.digest).pad_token_id
        return None if found is None else int(found)

    def to_json(self) -> dict[str, Any]:
        """Return the digest of the tokenizer's files, and the truncation length."""
        found = {"tokenizer": self.digest, "max_length": self.max_length}
        return {**found, "padding_side": "right"} if self.is_right_padded else found


@dataclass(frozen=True)
class Images:
    """An image processor, with its own resizing, cropping, scaling and normalising."""

    folder: str
    digest: str
    mode: str
    backend: str
    takes: str = "images"

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return pixels (n, C, H, W) float32 and related inputs by name; images are rotated upright, as in load_image."""
        from PIL import ImageOps  # slow import

        processor = _load_processor("AutoImageProcessor", self.folder, self.digest)
        found = processor(images=[ImageOps.exif_transpose(item) for item in items], return_tensors="pt")
        return TransformedInputs({name: tensor.numpy() for name, tensor in found.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the digest of the processor's files, and the resizing library, since libraries round differently."""
        return {"image_processor": self.digest, "mode": self.mode, "backend": self.backend}


@dataclass(frozen=True)
class Sounds:
    """A feature extractor; each clip is resampled to its rate and processed by itself.

    Attributes:
        rate: in Hz.
        min_length: samples that the network needs.
        max_length: samples after which clips are truncated; None for never.
        backend: library that computes its spectra, if the result depends on what is installed.
    """

    folder: str
    digest: str
    rate: int
    min_length: int
    max_length: int | None
    backend: str | None
    takes: str = "audio"
    mode: str = ""

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return inputs by name: (n, T) waves or (n, T, bins) spectra, zero-padded at the end."""
        extractor = _load_processor("AutoFeatureExtractor", self.folder, self.digest)
        found, num_truncated = [], 0
        for sound in items:
            samples = resample(sound, self.rate)
            if len(samples) < self.min_length:
                what = f"got {len(samples)} samples at {self.rate:,} Hz, expected at least {self.min_length}"
                raise DataError(f"{sound.where} is too short for the model: {what}", code="empty_clip")
            num_truncated += self.max_length is not None and len(samples) > self.max_length
            found.append(extractor(samples, sampling_rate=self.rate, return_tensors="np"))
        num_converted = sum(sound.rate != self.rate or sound.num_channels > 1 for sound in items)
        inputs = {name: _pad_clips([np.asarray(one[name]) for one in found]) for name in found[0]}
        lengths = tuple(next(iter(one.values())).shape[1] for one in found)
        return TransformedInputs(inputs, num_truncated, num_converted, lengths)

    def to_json(self) -> dict[str, Any]:
        """Return the digest of the extractor's files, and the steps before it."""
        own = {"feature_extractor": self.digest, "sampling_rate": self.rate, "max_length": self.max_length}
        made = {"resampling": "scipy.signal.resample_poly", "channels": "mean"}
        return {**own, **made, **({} if self.backend is None else {"backend": self.backend})}


def inputs_of(folder: Path, kind: str, config: Mapping[str, Any]) -> Texts | Images | Sounds | None:
    """Return what prepares the inputs of a model of Sequence, Image or Audio; None if the folder has nothing for that."""
    if kind == "Audio":
        return audio_inputs(folder, config)
    return text_inputs(folder, config) if kind == "Sequence" else image_inputs(folder, config)


def audio_inputs(folder: Path, config: Mapping[str, Any]) -> Sounds | None:
    """Return the feature extractor of a folder; None if it has none."""
    own = feature_extractor(folder)
    if own is None:
        return None
    rate = own["sampling_rate"]
    if not isinstance(rate, int) or rate < 1:
        message = (
            f"{quote_name(folder, limit=300)}: its feature extractor has sampling_rate {quote_name(rate)}, expected an "
            "integer in Hz"
        )
        raise DataError(message, path=folder)
    is_kaldi = own.get("feature_extractor_type") == "ASTFeatureExtractor"
    backend = ("torchaudio" if find_spec("torchaudio") is not None else "numpy") if is_kaldi else None
    digest = _digest(find_files_like(folder, PROCESSOR))
    return Sounds(str(folder.absolute()), digest, rate, _fewest_samples(own, config), _most_samples(own, rate), backend)


def _fewest_samples(own: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the samples of the first spectrum, or those that convolutions reduce to one position."""
    if own.get("feature_extractor_type") in ("ASTFeatureExtractor", "SeamlessM4TFeatureExtractor"):
        return 400
    kernels, strides = config.get("conv_kernel"), config.get("conv_stride")
    if not isinstance(kernels, list) or not isinstance(strides, list):
        return 1
    found = int(config.get("squeeze_factor", 1))  # positions merged into one
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=False):
        found = (found - 1) * stride + kernel
    return found


def _most_samples(own: Mapping[str, Any], rate: int) -> int | None:
    """Return the samples after which the two truncating feature extractors truncate; None for others, regardless of `max_length`.

    Whisper's takes `n_samples`; AST's `max_length` spectra of 400 samples, one every 160.
    """
    kind, frames = own.get("feature_extractor_type"), own.get("max_length")
    if kind == "WhisperFeatureExtractor":
        return int(own.get("chunk_length", 30)) * rate
    if kind == "ASTFeatureExtractor" and isinstance(frames, int):
        return 400 + frames * 160 - 1
    return None


def _pad_clips(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Zero-pad arrays (1, T, ...) at the end to one (n, longest T, ...)."""
    first = arrays[0]
    if first.ndim < 2:
        return np.concatenate(arrays)
    padded = np.zeros((len(arrays), max(one.shape[1] for one in arrays), *first.shape[2:]), first.dtype)
    for row, one in zip(padded, arrays, strict=True):
        row[: one.shape[1]] = one[0]
    return padded


def text_inputs(folder: Path, config: Mapping[str, Any]) -> Texts | None:
    """Return the tokenizer of a folder; None if it has none."""
    files = find_files_like(folder, TOKENIZER)
    if not files:
        return None
    own = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    limits = [own.get("model_max_length"), _positions(config)]
    lengths = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < _LARGEST]
    is_left = own.get("padding_side") == "left" and config.get("model_type") in _COUNTS_PADDING
    return Texts(str(folder.absolute()), _digest(files), min(lengths, default=None), is_right_padded=is_left)


def image_inputs(folder: Path, config: Mapping[str, Any]) -> Images | None:
    """Return the image processor of a folder; None if it has none."""
    files = find_files_like(folder, PROCESSOR)
    if not files:
        return None
    mode = "L" if config.get("num_channels") == 1 else "RGB"
    backend = "torchvision" if find_spec("torchvision") is not None else "pil"
    return Images(str(folder.absolute()), _digest(files), mode, backend)


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of token positions of a model; None if it uses relative positions."""
    if config.get("model_type") in ("gpt2", "openai-gpt", "ctrl"):
        return config.get("n_positions")
    number = config.get("max_position_embeddings")
    if number is not None and config.get("model_type") in _OFFSET_TYPES:
        return int(number) - int(config.get("pad_token_id") or 0) - 1
    return number


def _digest(files: Sequence[Path]) -> str:
    return f"sha256:{json_sha256([[file.name, file_sha256(file)] for file in files])}"


@lru_cache(maxsize=4)
def _load_processor(auto: str, folder: str, digest: str, **settings: Any) -> Any:
    """Load the tokenizer, image processor or feature extractor of a folder with this digest, with other settings.

    Raises:
        DataError: the library cannot load it from the folder.
        Untrusted: it is code in the folder.
    """
    maker = library_attribute(require("transformers", extra="hf"), auto, extra="hf")
    try:
        return maker.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **settings)
    except Exception as error:  # the library's, about the contents of the files
        why = " ".join(str(error).split())[:200]
        what = {"AutoTokenizer": "tokenizer", "AutoFeatureExtractor": "feature extractor"}.get(auto, "image processor")
        if "trust_remote_code" in why or "custom code" in why:
            raise Untrusted(
                f"{quote_name(folder, limit=300)}: its {what} is defined by code in the folder (auto_map), which "
                "bnncli never runs",
                path=folder,
            ) from error
        raise DataError(f"{quote_name(folder, limit=300)}: cannot load its {what}: {why}", path=folder) from error


def load_tokenizer(folder: str, digest: str, **settings: Any) -> Any:
    """Load the tokenizer of a folder with this digest, with other settings. Raises as _load_processor."""
    _settle_threads()
    return _load_processor("AutoTokenizer", folder, digest, **settings)


def _settle_threads() -> None:
    """Allow threads in this process, but not in workers, where the library would deadlock or warn."""
    import torch.utils.data

    if torch.utils.data.get_worker_info() is not None:
        os.environ[_PARALLEL] = "false"
    else:
        os.environ.setdefault(_PARALLEL, "true")


NO_PADDING = -1  # no token has this id
_COUNTER = ".num_batches_tracked"  # of batch norms; absent before torch 0.4.1 and not needed for prediction


def classifier(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor] | None) -> nn.Module:
    """Build the classifier of a `save_pretrained` folder, in evaluation mode, float32, on the CPU.

    Args:
        config: from config.json.
        state: tensors to load; None for the folder's own weights.

    Raises:
        DataError: a weight is missing, unknown or of another shape, or the library cannot build the network.
        Untrusted: its definition is code in its folder.
    """
    made_by, name = load_config(folder), architecture_of(config)
    transformers = require("transformers", extra="hf")
    made = library_attribute(transformers, str(name), extra="hf")
    if made is None:
        raise _unknown_model_error(folder, config, f"transformers {transformers.__version__} has no {name}")
    if state is None:
        state = load_pickled_state(folder)
    network, info = load(made, folder, made_by, state)
    check_filled(
        info, what=f"the {'checkpoint' if state is not None else 'folder'} does not match {name}", folder=folder
    )
    return prepare_network(network)


def load_config(folder: Path, **changes: Any) -> Any:
    """Load config.json with the library, never running code of the folder.

    Raises:
        DataError, Untrusted: it cannot be loaded.
    """
    transformers = require("transformers", extra="hf")
    with convert_library_errors(folder):
        return transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **changes
        )


def load(made: Any, folder: Path, config: Any, state: Mapping[str, Tensor] | None) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network of a library class, and the library's report on mismatched names."""
    if state is None and not weight_files(folder):
        message = f"{quote_name(folder, limit=300)} has no weights; looked for {WEIGHTS}, its index, and {PICKLED}"
        sharded = find_sharded_folder(folder)
        hint = "pass a weights file as the checkpoint"
        raise MissingInput(message, path=folder, hint=hint if sharded is None else f"{hint}; {sharded.hint}")
    given = {} if state is None else {"state_dict": dict(state)}
    with convert_library_errors(folder):
        network, info = made.from_pretrained(
            str(folder) if state is None else None, config=config, dtype=torch.float32, output_loading_info=True,
            ignore_mismatched_sizes=True, local_files_only=True, trust_remote_code=False, use_safetensors=True, **given,
        )  # fmt: skip
        own, whole = network.state_dict(), _find_integer_tensors(folder, state)
    if odd := sorted(name for name in whole & own.keys() if own[name].is_floating_point()):
        raise DataError(
            f"{quote_name(folder, limit=300)}: the weights {format_names(odd)} are integers, but the network expects "
                "floating-point numbers",
            code="quantised", path=folder, hint="save the model before quantisation",
        )  # fmt: skip
    return network, info


def _find_integer_tensors(folder: Path, state: Mapping[str, Tensor] | None) -> set[str]:
    """Return the names of integer tensors, which the library would convert to floats."""
    from safetensors import safe_open

    if state is not None:
        return {name for name, tensor in state.items() if not tensor.is_floating_point()}
    found: set[str] = set()
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as stored:
                names = list(stored.keys())
                found |= {name for name in names if not stored.get_slice(name).get_dtype().startswith(("F", "BF"))}
    return found


def check_filled(
    info: Mapping[str, Any],
    *,
    what: str,
    folder: Path,
    may_miss: Callable[[str], bool] = lambda name: False,
    may_have: Callable[[str], bool] = lambda name: False,
) -> None:
    """Check that every weight of a network came from its file and vice versa.

    Args:
        info: from from_pretrained, without names that the architecture itself ignores.
        may_miss, may_have: whether a name may be missing or of another shape, or unknown.

    Raises:
        DataError: lists the names.
    """
    missing = sorted(name for name in info["missing_keys"] if not name.endswith(_COUNTER) and not may_miss(name))
    unknown = sorted(name for name in info["unexpected_keys"] if not may_have(name))
    odd = sorted(f"{quote_name(name)} has {shapes}" for name, shapes in _mismatches(info) if not may_miss(name))
    parts = [f"missing from the weights ({len(missing)}): {format_names(missing)}"] if missing else []
    parts += [f"not in the network ({len(unknown)}): {format_names(unknown)}"] if unknown else []
    parts += odd[:3]
    parts += [" ".join(str(text).split())[:200] for text in info.get("error_msgs", [])[:1]]
    if parts:
        raise DataError(
            f"{quote_name(folder, limit=300)}: {what}; {'; '.join(parts)}", code="wrong_weights", path=folder
        )


def _mismatches(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of weights of another shape, and their shapes, which transformers before 5 does not report."""
    for found in info["mismatched_keys"]:
        if isinstance(found, str):
            yield found, "another shape in the network"
        else:
            name, came, own = found
            yield name, f"shape {tuple(came)} in the weights, {tuple(own)} in the network"


def prepare_network(network: nn.Module) -> nn.Module:
    """Return the network in evaluation mode, float32, without gradients or caches."""
    check_finite({name: value for name, value in network.state_dict().items() if isinstance(value, torch.Tensor)})
    config: Any = network.config
    if getattr(config, "use_cache", None):
        config.use_cache = False
    return network.float().eval().requires_grad_(False)


def set_padding_token(network: nn.Module, transform: Texts | Images | Sounds | None) -> nn.Module:
    """Set the padding token of the tokenizer on a network whose configuration has none or another.

    Decoders classify at a text's last non-padding token. Without a padding token they see unpadded texts and use the
    last token.
    """
    config: Any = network.config
    if isinstance(transform, Texts):
        token, own = transform.pad_token_id, getattr(config, "pad_token_id", None)
        if token is not None or own is None:
            config.pad_token_id = NO_PADDING if token is None else token
    return network


@contextmanager
def convert_library_errors(folder: Path) -> Iterator[None]:
    """Silence the library inside the block, and convert its exceptions to errors about the folder.

    Raises:
        DataError, Untrusted: with the first line of the exception.
    """
    logging = require("transformers.utils.logging", extra="hf")
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    except (BnnError, MemoryError):
        raise
    except Exception as error:  # foreign code: whatever it raises, this folder cannot be used
        why = " ".join(str(error).split())
        if "trust_remote_code" in why:
            raise _is_code(folder) from error
        message = f"{quote_name(folder, limit=300)}: cannot load the model: {type(error).__name__}: {why[:200]}"
        raise DataError(message, path=folder) from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _is_code(folder: Path) -> Untrusted:
    return Untrusted(
        f"{quote_name(folder, limit=300)}: the model is defined by code in the folder (auto_map in {CONFIG}), which "
        "bnncli never runs",
        hint="if you trust this code, use \0model\0 file.py:factory with a factory that builds the network",
        path=folder / CONFIG,
    )


def _unknown_model_error(folder: Path, config: Mapping[str, Any], why: str) -> BnnError:
    if "auto_map" in config:
        return _is_code(folder)
    return DataError(f"{quote_name(folder, limit=300)}: {why}", path=folder / CONFIG)


def load_pickled_state(folder: Path) -> dict[str, Tensor] | None:
    """Load weights in torch's own format; None if they are safetensors."""
    files = weight_files(folder)
    return load_checkpoint(files[0]).state if files and files[0].name.startswith(PICKLED) else None
