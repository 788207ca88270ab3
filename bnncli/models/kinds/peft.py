"""`peft:DIR`: a peft adapter, merged into the classifier or language model it was trained on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.lazy import torch
from bnncli.models import ModelRequest
from bnncli.models.answers import Prompts, is_causal, read_prompts
from bnncli.models.huggingface import (
    ADAPTER_CONFIG,
    CONFIG,
    Images,
    Sounds,
    Texts,
    architecture_of,
    check_filled,
    check_plain,
    classes_of,
    classifier_input_kind,
    convert_library_errors,
    feature_extractor,
    find_files_like,
    find_folder,
    input_patterns,
    load,
    load_config,
    load_pickled_state,
    prepare_network,
    safetensors_shapes,
    task_of,
    weight_files,
)
from bnncli.models.libraries import library_attribute, require
from bnncli.models.preferences import Pairs, read_inputs
from bnncli.names import format_names, quote_name
from bnncli.options.declaration import Form
from bnncli.system.input_files import read_object

if TYPE_CHECKING:
    from torch import Tensor, nn


_COPIES = ".modules_to_save."  # with bias="all" the library stores the biases of fully saved modules twice
_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"


def build_adapted(
    folder: Path, base: Path, kind: str, architecture: str | None, *, is_merged: bool = True
) -> nn.Module:
    """Build the classifier of a base folder with an adapter merged or separate, in evaluation mode, float32, on the CPU.

    What the adapter stores in full (modules_to_save, such as the classifier) may be missing from the base. If the base
    is not a classifier, its own head is dropped.

    Args:
        kind: Sequence, Token, Image or Audio.
        architecture: class that the base was saved from.

    Raises:
        DataError: a weight is missing, unknown or of another shape, or the libraries cannot build the network.
    """
    auto = getattr(require("transformers", extra="hf"), f"AutoModelFor{kind}Classification")
    saved = {
        name.removeprefix(_PREFIX): shape
        for name, shape in safetensors_shapes(folder / _WEIGHTS).items() if ".lora_" not in name
    }  # fmt: skip
    config = load_config(base)
    with convert_library_errors(base), torch.device("meta"):
        empty = auto.from_config(config)
    labels = _num_labels(empty, config, saved)
    if labels is not None:
        config = load_config(base, num_labels=labels)
    network, info = load(type(empty), base, config, load_pickled_state(base))
    check_filled(
        info,
        what=f"the base model does not match {type(network).__name__}",
        folder=base,
        may_miss=lambda name: name in saved,
        may_have=lambda name: classifier_input_kind(architecture) is None,
    )
    return prepare_network(_apply_adapter(network, folder, is_merged=is_merged))


def build_adapted_language_model(folder: Path, prompts: Prompts, base: Path, *, is_merged: bool = True) -> nn.Module:
    """Build a language model with an adapter, as a classifier of the prompts' answers; otherwise as `build_adapted`."""
    from bnncli.models.answers import answer_network

    name = str(architecture_of(read_object(base / CONFIG)))
    made = library_attribute(require("transformers", extra="hf"), name, extra="hf")
    if made is None:
        raise DataError(f"{quote_name(base, limit=300)}: transformers has no {name}", path=base / CONFIG)
    network, info = load(made, base, load_config(base), load_pickled_state(base))
    check_filled(info, what=f"the base model does not match {name}", folder=base)
    return answer_network(prepare_network(_apply_adapter(network, folder, is_merged=is_merged)), prompts)


def _num_labels(empty: nn.Module, config: Any, saved: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the number of outputs of the adapter's own head, if it differs from the base's config."""
    own = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    found = {
        shape[0]
        for name, shape in saved.items()
        if name in own and shape and own[name][1:] == shape[1:] and own[name][0] == config.num_labels != shape[0]
    }
    return found.pop() if len(found) == 1 else None


def _find_unknown_names(weights: Path, names: Sequence[str]) -> list[str]:
    """Return the names that the library could not place, except copies of tensors that it could."""
    with safe_open(weights, "pt") as stored:
        known = {*stored.keys()}
        return [
            name
            for name in names
            if _COPIES not in name
            or (own := name.replace(_COPIES, ".")) not in known
            or not torch.equal(stored.get_tensor(name), stored.get_tensor(own))
        ]


def _apply_adapter(network: nn.Module, folder: Path, *, is_merged: bool) -> nn.Module:
    """Apply the adapter to the network, merged into its weights or as wrapping layers.

    Raises:
        DataError: names of the adapter's file are missing or unknown, or its kind cannot be merged.
    """
    peft = require("peft", extra="peft")
    with convert_library_errors(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names, which are errors here
        config = peft.PeftConfig.from_pretrained(str(folder))
        model = peft.get_peft_model(network, config)
        found = model.load_adapter(str(folder), "default", is_trainable=False, torch_device="cpu")
    parts = [
        f"{what} ({len(names)}): {format_names(sorted(names))}"
        for what, names in (
            ("missing from the adapter", found.missing_keys),
            ("not in the network", _find_unknown_names(folder / _WEIGHTS, found.unexpected_keys)),
        )
        if names
    ]
    if parts:
        message = (
            f"{quote_name(folder, limit=300)}: the adapter does not match {type(network).__name__}; {'; '.join(parts)}"
        )
        raise DataError(message, code="wrong_weights", path=folder)
    if not hasattr(model.base_model, "merge_and_unload"):
        message = (
            f"{quote_name(folder, limit=300)}: adapters of kind {config.peft_type} cannot be merged into the weights"
        )
        raise DataError(message, code="not_supported", path=folder)
    if not is_merged:
        apart: nn.Module = model.base_model.model
        return apart
    with convert_library_errors(folder):
        merged: nn.Module = model.merge_and_unload(safe_merge=True)
    return merged


FORM = Form("peft:DIR", 20, "A PEFT adapter, merged into its base model.")
EXTRA: str | None = "peft"
TAKES: tuple[str, ...] = ("base_model", "allow_download", "model_arg")

_ADAPTER, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_CHOOSERS = {"XLORA": "selects adapters from other folders for each input"}  # which would be downloaded
_TASKS = {"SEQ_CLS": "Sequence", "TOKEN_CLS": "Token"}
_PROMPTS = ("PROMPT", "PREFIX", "P_TUNING")  # adapters that are additional inputs, not other weights


@dataclass(frozen=True)
class AdaptedClassifier:
    """A classifier with an adapter, with the weights of both folders.

    Attributes:
        kind: Sequence, Token, Image or Audio, what it classifies.
        config: of the base model.
    """

    folder: Path
    base: Path
    kind: str
    config: Mapping[str, Any] = field(repr=False)
    classes: tuple[str, ...] | None
    transform: Texts | Images | Sounds | None
    files: tuple[Path, ...]
    task: str | None

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network with the adapter merged; see `adapted`. Raises UsageError for other weights."""
        from bnncli.models.preferences import finish_network

        if state is not None:
            raise _other_weights_error()
        return finish_network(
            build_adapted(self.folder, self.base, self.kind, architecture_of(self.config)), self.transform
        )

    def build_apart(self) -> nn.Module:
        """Build the same network with separate adapter parameters."""
        from bnncli.models.preferences import finish_network

        apart = build_adapted(self.folder, self.base, self.kind, architecture_of(self.config), is_merged=False)
        return finish_network(apart, self.transform)


@dataclass(frozen=True)
class AdaptedLanguageModel:
    """A language model with an adapter that answers closed questions."""

    folder: Path
    base: Path
    transform: Prompts
    files: tuple[Path, ...]
    task: str | None = "multiclass"

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the answers."""
        return self.transform.question.answers

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network with the adapter merged. Raises UsageError for other weights."""
        if state is not None:
            raise _other_weights_error()
        return build_adapted_language_model(self.folder, self.transform, self.base)

    def build_apart(self) -> nn.Module:
        """Build the same network with separate adapter parameters."""
        return build_adapted_language_model(self.folder, self.transform, self.base, is_merged=False)


def _other_weights_error() -> UsageError:
    return UsageError(
        "\0model\0 peft:DIR has its own weights (adapter and base model), but the checkpoint is a different file",
        hint="give the adapter's folder as the checkpoint; if you only need a name for the run, any name will do",
    )


def open_model(place: str, asked: ModelRequest) -> AdaptedClassifier | AdaptedLanguageModel:
    """Open the classifier or language model of an adapter's folder and its base folder.

    Raises:
        MissingInput: a folder or file is missing.
        DataError: a file is damaged, it is not a classifier, or the adapter cannot be merged.
        UsageError: the base folder is unknown.
    """
    folder = find_folder(place, option="\0model\0", allow_download=asked.allow_download)
    if not (folder / ADAPTER_CONFIG).is_file():
        hint = f"this is a full model: use \0model\0 hf:{place}" if (folder / CONFIG).is_file() else None
        raise MissingInput(
            f"no {ADAPTER_CONFIG} in {quote_name(folder, limit=300)}", path=folder / ADAPTER_CONFIG, hint=hint
        )
    adapter = read_object(folder / ADAPTER_CONFIG)
    weights = _weights(folder, adapter)
    base = _base_of(adapter, folder, asked)
    config = read_object(base / CONFIG)
    check_plain({**config, "problem_type": None} if asked.arguments else config, base)
    if is_causal(architecture_of(config)) and adapter.get("task_type") in ("CAUSAL_LM", None):
        prompts = read_prompts((folder, base), config, asked.arguments)
        own = (folder / ADAPTER_CONFIG, weights, base / CONFIG, *weight_files(base))
        tokenizer = find_files_like(Path(prompts.folder), input_patterns("Sequence"))
        return AdaptedLanguageModel(folder, base, prompts, files=(*own, *tokenizer))
    kind = _kind(adapter, config, folder)
    if kind == "Sequence" and any(feature_extractor(one) is not None for one in (folder, base)):
        kind = "Audio"  # many audio models are named after sequences
    if asked.arguments and kind != "Sequence":
        raise UsageError("\0model_arg\0: only adapters of language models and classifiers of texts take arguments")
    patterns = input_patterns(kind)
    inputs = folder if find_files_like(folder, patterns) else base
    transform = read_inputs((inputs, base), kind, config, asked.arguments)
    return AdaptedClassifier(
        folder,
        base,
        kind,
        config,
        transform.comparison.classes if isinstance(transform, Pairs) else _classes(config, base, weights),
        transform=transform,
        files=(
            folder / ADAPTER_CONFIG,
            weights,
            base / CONFIG,
            *weight_files(base),
            *find_files_like(inputs, patterns),
        ),
        task="binary" if isinstance(transform, Pairs) else task_of(config) if config.get("problem_type") else None,
    )


def _weights(folder: Path, adapter: Mapping[str, Any]) -> Path:
    """Return the adapter's own file. Raises MissingInput, or DataError if its kind is not supported."""
    where, kind = quote_name(folder, limit=300), str(adapter.get("peft_type")).upper()
    does = "adds inputs" if any(word in kind for word in _PROMPTS) else _CHOOSERS.get(kind)
    if does is not None:
        message = (
            f"{where}: an adapter of kind {kind} {does}, so it cannot be merged into the weights; this is not supported"
        )
        raise DataError(message, code="not_supported", path=folder / ADAPTER_CONFIG)
    if (folder / _ADAPTER).is_file():
        return folder / _ADAPTER
    if (folder / _PICKLED).is_file():
        message = f"{where}: expected {_ADAPTER}, got the pickle {_PICKLED}"
        raise DataError(
            message, code="needs_code", path=folder / _PICKLED, hint="save it again with model.save_pretrained(DIR)"
        )
    raise MissingInput(f"no {_ADAPTER} in {where}", path=folder / _ADAPTER)


def _base_of(adapter: Mapping[str, Any], folder: Path, asked: ModelRequest) -> Path:
    """Return the base folder: as given, or as named by the adapter if it exists on this machine."""
    named = adapter.get("base_model_name_or_path")
    place = asked.base_model or (named if isinstance(named, str) and named else None)
    if place is None:
        raise UsageError(
            f"{quote_name(folder, limit=300)} does not name its base model; give it with \0base_model\0 DIR"
        )
    if asked.base_model is None and not Path(place).is_dir() and not asked.allow_download:
        message = f"{quote_name(folder, limit=300)} is an adapter for {quote_name(place)}, which is not a local folder"
        raise UsageError(message, hint="give the folder of the base model: \0base_model\0 DIR")
    base = find_folder(place, option="\0base_model\0", allow_download=asked.allow_download)
    if not (base / CONFIG).is_file():
        raise MissingInput(f"\0base_model\0: no {CONFIG} in {quote_name(base, limit=300)}", path=base / CONFIG)
    return base


def _kind(adapter: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> str:
    """Return Sequence, Token, Image or Audio. Raises DataError for other adapters."""
    mapping, task = adapter.get("auto_mapping"), adapter.get("task_type")
    made_by = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    kind = _TASKS.get(str(task)) or classifier_input_kind(made_by or architecture_of(config))
    if kind is None or task not in (*_TASKS, "FEATURE_EXTRACTION", None):
        what = f"for {made_by or architecture_of(config)}" + (f" for {task}" if task else "")
        message = f"{quote_name(folder, limit=300)}: expected an adapter of a sequence, token, image or audio classifier, got one {what}"
        raise DataError(message, code="not_a_classifier", path=folder / ADAPTER_CONFIG)
    return kind


def _classes(config: Mapping[str, Any], base: Path, weights: Path) -> tuple[str, ...] | None:
    """Return the base model's classes, unless the adapter has its own head with another number of classes."""
    classes = classes_of(config, base)
    shapes = [shape for name, shape in safetensors_shapes(weights).items() if ".lora_" not in name]
    return classes if classes is None or not shapes or any(shape[:1] == (len(classes),) for shape in shapes) else None
