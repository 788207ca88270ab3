"""extract-features without --model, or with one that cannot be the checkpoint's: what the checkpoint itself tells of its network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bnncli.errors import BnnError, UsageError
from bnncli.models import is_kind
from bnncli.options.command import CommandLine
from bnncli.options.extract_features import EITHER, ExtractFeaturesOptions
from bnncli.session.run import Run
from bnncli.stages.extract_features.trained_here import own_code_line
from bnncli.stages.inspect import recognised_model


def no_model(run: Run, options: ExtractFeaturesOptions) -> UsageError:
    """The error of a command that names no network, with the line that would work where the checkpoint tells of one."""
    path = Path(run.arguments["ckpt"])
    is_complete = bool(options.data or options.ood)
    trained = own_code_line(run)
    if trained is not None:
        message = (
            f"{path.name} was trained with a network from your own code; to run it, name the network with \0model\0"
        )
        return UsageError(message, hint=trained.pasted() + ("" if is_complete else " \0data\0 SPLIT=SPEC"))
    found = recognised_model(path) if path.exists() else None
    if found is None:
        return UsageError(EITHER)
    model, line = found
    return UsageError(EITHER, hint=run.line.having("model", model).pasted() if is_complete else line)


# Of a network in code, or of inputs whose preprocessing the network does not bring.
_OF_CODE = ("model_arg", "last_layer", "output", "state", "base_model", "feature_node")
_OF_ARRAYS = ("mean", "std", "resize", "crop")
_WITH_TRANSFORM = ("hf", "peft", "timm")


@contextmanager
def own_model_told(run: Run, options: ExtractFeaturesOptions) -> Iterator[None]:
    """Where CKPT is no weights inside the block but another model of its own, the error's hint is the line that runs it."""
    try:
        yield
    except BnnError as error:
        line = _own_line(run, options) if error.path == str(run.arguments["ckpt"]) else None
        if line is None:
            raise
        raise type(error)(error.message, hint=line.pasted(), code=error.code, path=error.path) from error


def _own_line(run: Run, options: ExtractFeaturesOptions) -> CommandLine | None:
    """The command with the model that CKPT is; None where it is none but the one that was named, or cannot be told."""
    path = Path(run.arguments["ckpt"])
    found = recognised_model(path) if path.exists() else None
    if found is None or not is_kind(found[0]) or found[0] == options.model:
        return None
    if found[0].partition(":")[2] != str(path):  # a network for its weights
        return None
    line = run.line.having("model", found[0])
    for name in (*_OF_CODE, *(_OF_ARRAYS if found[0].partition(":")[0] in _WITH_TRANSFORM else ())):
        line = line.having(name, None)
    return line
