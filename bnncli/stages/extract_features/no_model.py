"""extract-features without --model: what the checkpoint itself tells of its network."""

from __future__ import annotations

from pathlib import Path

from bnncli.errors import UsageError
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.extract_features import EITHER
from bnncli.run.session import Run
from bnncli.stages.inspect import recognised_model


def no_model(run: Run, options: ExtractFeaturesOptions) -> UsageError:
    """The error of a command that names no network, with the line that would work where the checkpoint tells of one."""
    path = Path(run.arguments["ckpt"])
    found = recognised_model(path) if path.exists() else None
    if found is None:
        return UsageError(EITHER)
    model, line = found
    is_complete = bool(options.data or options.ood)
    return UsageError(EITHER, hint=run.line.having("model", model).pasted() if is_complete else line)
