"""`peft:DIR`: a peft adapter, merged into the classifier it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.models import Asked
from bnncli.models._hf_folder import (
    ADAPTER_CONFIG,
    CONFIG,
    architecture_of,
    check_plain,
    classes_of,
    classified_by,
    feature_extractor,
    files_like,
    folder_of,
    input_patterns,
    safetensors_shapes,
    task_of,
    weight_files,
)
from bnncli.models._hf_inputs import Images, Sounds, Texts, inputs_of
from bnncli.names import quoted
from bnncli.options.parts import Form
from bnncli.system.input_files import read_object

if TYPE_CHECKING:
    from torch import Tensor, nn

FORM = Form("peft:DIR", 20, "A PEFT adapter, merged into its base model.")
EXTRA: str | None = "peft"
TAKES: tuple[str, ...] = ("base_model", "allow_download")

_ADAPTER, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_CHOOSERS = {"XLORA": "selects adapters from other folders for each input"}  # which would be fetched
_PROMPTS = ("PROMPT", "PREFIX", "P_TUNING")  # kinds of adapters that are more inputs, not other weights


@dataclass(frozen=True)
class Adapted:
    """A classifier with an adapter; its weights are those of both folders.

    Attributes:
        kind: Sequence, Image or Audio, what it classifies.
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
        """The network with the adapter merged into its weights; see `adapted`. Raises UsageError for other weights."""
        from bnncli.models._hf_network import with_padding  # here, for torch
        from bnncli.models._peft_network import adapted

        if state is not None:
            raise UsageError(
                "\0model\0 peft:DIR has its own weights (adapter and base model), but the checkpoint is a "
                "different file",
                hint="give the adapter's folder as the checkpoint; if you only need a name for the run, any name "
                "will do",
            )
        return with_padding(adapted(self.folder, self.base, self.kind, architecture_of(self.config)), self.transform)

    def build_apart(self) -> nn.Module:
        """The same network with the adapter's parameters beside those that they change."""
        from bnncli.models._hf_network import with_padding  # here, for torch
        from bnncli.models._peft_network import adapted

        apart = adapted(self.folder, self.base, self.kind, architecture_of(self.config), is_merged=False)
        return with_padding(apart, self.transform)


def open_model(place: str, asked: Asked) -> Adapted:
    """The classifier that an adapter's folder and its base folder make.

    Raises:
        MissingInput: a folder or a file is missing.
        DataError: a file is damaged, it is no classifier, or the adapter cannot be merged.
        UsageError: the base folder is not known.
    """
    folder = folder_of(place, option="\0model\0", allow_download=asked.allow_download)
    if not (folder / ADAPTER_CONFIG).is_file():
        hint = f"this is a full model: use \0model\0 hf:{place}" if (folder / CONFIG).is_file() else None
        raise MissingInput(
            f"no {ADAPTER_CONFIG} in {quoted(folder, limit=300)}", path=folder / ADAPTER_CONFIG, hint=hint
        )
    adapter = read_object(folder / ADAPTER_CONFIG)
    weights = _weights(folder, adapter)
    base = _base_of(adapter, folder, asked)
    config = read_object(base / CONFIG)
    check_plain(config, base)
    kind = _kind(adapter, config, folder)
    if kind == "Sequence" and any(feature_extractor(one) is not None for one in (folder, base)):
        kind = "Audio"  # many networks of audio are called those of sequences
    patterns = input_patterns(kind)
    inputs = folder if files_like(folder, patterns) else base
    return Adapted(
        folder,
        base,
        kind,
        config,
        _classes(config, base, weights),
        transform=inputs_of(inputs, kind, config),
        files=(folder / ADAPTER_CONFIG, weights, base / CONFIG, *weight_files(base), *files_like(inputs, patterns)),
        task=task_of(config) if config.get("problem_type") else None,
    )


def _weights(folder: Path, adapter: Mapping[str, Any]) -> Path:
    """The adapter's own file. Raises MissingInput, or DataError where its kind is not supported."""
    where, kind = quoted(folder, limit=300), str(adapter.get("peft_type")).upper()
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


def _base_of(adapter: Mapping[str, Any], folder: Path, asked: Asked) -> Path:
    """The base folder: as given, or as the adapter names it where that is on this machine."""
    named = adapter.get("base_model_name_or_path")
    place = asked.base_model or (named if isinstance(named, str) and named else None)
    if place is None:
        raise UsageError(f"{quoted(folder, limit=300)} does not name its base model; give it with \0base_model\0 DIR")
    if asked.base_model is None and not Path(place).is_dir() and not asked.allow_download:
        message = f"{quoted(folder, limit=300)} is an adapter for {quoted(place)}, which is not a local folder"
        raise UsageError(message, hint="give the folder of the base model: \0base_model\0 DIR")
    base = folder_of(place, option="\0base_model\0", allow_download=asked.allow_download)
    if not (base / CONFIG).is_file():
        raise MissingInput(f"\0base_model\0: no {CONFIG} in {quoted(base, limit=300)}", path=base / CONFIG)
    return base


def _kind(adapter: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> str:
    """Sequence, Image or Audio. Raises DataError for an adapter that is for none of them."""
    mapping, task = adapter.get("auto_mapping"), adapter.get("task_type")
    made_by = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    kind = "Sequence" if task == "SEQ_CLS" else classified_by(made_by or architecture_of(config))
    if kind is None or task not in ("SEQ_CLS", "FEATURE_EXTRACTION", None):
        what = f"for {made_by or architecture_of(config)}" + (f" for {task}" if task else "")
        message = (
            f"{quoted(folder, limit=300)}: expected an adapter of a sequence, image or audio classifier, got one {what}"
        )
        raise DataError(message, code="not_a_classifier", path=folder / ADAPTER_CONFIG)
    return kind


def _classes(config: Mapping[str, Any], base: Path, weights: Path) -> tuple[str, ...] | None:
    """The base model's, unless the adapter has a head of its own for another number of them."""
    classes = classes_of(config, base)
    shapes = [shape for name, shape in safetensors_shapes(weights).items() if ".lora_" not in name]
    return classes if classes is None or not shapes or any(shape[:1] == (len(classes),) for shape in shapes) else None
