"""`hf:DIR`: a Hugging Face text, token, image or audio classifier, reward or language model, in a `save_pretrained` folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import MissingInput, UsageError
from bnncli.models import ModelRequest
from bnncli.models.answers import Prompts, is_causal, read_prompts
from bnncli.models.huggingface import (
    ADAPTER_CONFIG,
    CONFIG,
    Images,
    Sounds,
    Texts,
    architecture_of,
    check_plain,
    classes_of,
    find_files_like,
    find_folder,
    input_patterns,
    kind_of,
    task_of,
    weight_files,
)
from bnncli.models.output_folders import choose_checkpoint
from bnncli.models.preferences import Pairs, read_inputs
from bnncli.models.sharded import find_sharded_folder
from bnncli.names import quote_name
from bnncli.options.declaration import Form
from bnncli.system.input_files import read_object

if TYPE_CHECKING:
    from torch import Tensor, nn

FORM = Form("hf:DIR", 10, "A Hugging Face classifier or language model saved by save_pretrained.")
EXTRA: str | None = "hf"
TAKES: tuple[str, ...] = ("allow_download", "model_arg")


@dataclass(frozen=True)
class Classifier:
    """A sequence, token, image or audio classifier with the folder's weights, unless others are loaded."""

    folder: Path
    config: Mapping[str, Any] = field(repr=False)
    classes: tuple[str, ...] | None
    transform: Texts | Images | Sounds | None
    files: tuple[Path, ...]
    task: str | None

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network with the folder's weights or those of `state`; see `classifier`."""
        from bnncli.models.huggingface import classifier  # imports torch
        from bnncli.models.preferences import finish_network

        return finish_network(classifier(self.folder, self.config, state), self.transform)


def open_model(place: str, asked: ModelRequest) -> Classifier | LanguageModel:
    """Open the classifier in a folder, or of a name on the Hugging Face Hub if downloads are allowed.

    Raises:
        MissingInput: the folder, its config.json or a shard is missing.
        DataError: a file is damaged, the model is not a classifier, or its weights are quantised.
    """
    folder = find_folder(place, option="\0model\0", allow_download=asked.allow_download)
    if not (folder / CONFIG).is_file():
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        hint = (
            f"this is an adapter: use \0model\0 peft:{place}"
            if is_adapter
            else "expected a folder written by save_pretrained"
        )
        if (choice := choose_checkpoint(folder)) is not None and (choice.path / CONFIG).is_file():
            hint = f"use \0model\0 hf:{choice.path} ({choice.reason})"
        elif (sharded := find_sharded_folder(folder if choice is None else choice.path)) is not None:
            hint = sharded.hint
        raise MissingInput(f"no {CONFIG} in {quote_name(folder, limit=300)}", path=folder / CONFIG, hint=hint)
    config = read_object(folder / CONFIG)
    if is_causal(architecture_of(config)):
        return _open_language_model(folder, config, asked)
    kind = kind_of({**config, "problem_type": None} if asked.arguments else config, folder)  # scores may be regressions
    if asked.arguments and kind != "Sequence":
        raise UsageError(
            f"\0model_arg\0: only language models and classifiers of texts take arguments; {quote_name(folder, limit=300)} "
            f"is {quote_name(architecture_of(config))}"
        )
    transform = read_inputs((folder,), kind, config, asked.arguments)
    return Classifier(
        folder,
        config,
        transform.comparison.classes if isinstance(transform, Pairs) else classes_of(config, folder),
        transform=transform,
        files=(folder / CONFIG, *weight_files(folder), *find_files_like(folder, input_patterns(kind))),
        task="binary" if isinstance(transform, Pairs) else task_of(config),
    )


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model that answers closed questions."""

    folder: Path
    config: Mapping[str, Any] = field(repr=False)
    transform: Prompts
    files: tuple[Path, ...]
    task: str | None = "multiclass"

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the answers."""
        return self.transform.question.answers

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network from prompts to the answers' logits, with the folder's weights or those of `state`."""
        from bnncli.models.answers import answer_network
        from bnncli.models.huggingface import classifier  # imports torch

        return answer_network(classifier(self.folder, self.config, state), self.transform)


def _open_language_model(folder: Path, config: Mapping[str, Any], asked: ModelRequest) -> LanguageModel:
    check_plain(config, folder)
    prompts = read_prompts((folder,), config, asked.arguments)
    files = (folder / CONFIG, *weight_files(folder), *find_files_like(folder, input_patterns("Sequence")))
    return LanguageModel(folder, config, prompts, files)
