"""A checkpoint that train wrote: the network and the preprocessing that it records, which need not be said again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.posteriors import PREPROCESSING, RECORDED_NETWORK, trained_header
from bnncli.options.command import CommandLine
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.registry import own_names
from bnncli.session.run import Run


def with_recorded(run: Run, options: ExtractFeaturesOptions) -> ExtractFeaturesOptions:
    """The options with the network that the checkpoint was trained as, and its preprocessing, where no network is named.

    What a file names is never run as code: of a network by code the user is asked. Warns where a network that is named gets
    inputs of another preprocessing than it was trained with.
    """
    header = trained_header(Path(run.arguments["ckpt"])) if options.from_npz is None else None
    if header is None:
        return options
    recorded = _recorded(header)
    if options.model is None and recorded["model"] in own_names("networks"):
        given = {name: getattr(options, name) for name in (*PREPROCESSING, "model_arg")}
        run.console.info(f"{header.path.name} was trained with {_said(recorded)}")
        return replace(options, **{name: value for name, value in recorded.items() if not given.get(name)})
    if options.model is not None:
        differing = [name for name in PREPROCESSING if getattr(options, name) != recorded[name]]
        for name in differing:
            run.console.warn(
                f"{header.path.name} was trained with \0{name}\0 {recorded[name] or 'unset'}; you asked for "
                f"{getattr(options, name) or 'none'}"
            )
    return options


def own_code_line(run: Run) -> CommandLine | None:
    """The command with the network of the user's own code that train recorded; None where the checkpoint records none."""
    header = trained_header(Path(run.arguments["ckpt"]))
    if header is None:
        return None
    line = run.line
    for name, value in _recorded(header).items():
        line = line if line.gives(name) else line.having(name, value)
    return line


def _recorded(header: Header) -> dict[str, Any]:
    with interpreting(header.path):
        params = header.provenance["params"]
        return {name: params[name] for name in RECORDED_NETWORK}


def _said(recorded: dict[str, Any]) -> str:
    """The network and the preprocessing in words."""
    words = [str(recorded["model"]), *map(str, recorded["model_arg"])]
    words += [f"{name} {recorded[name]}" for name in PREPROCESSING if recorded[name] is not None]
    return ", ".join(words)
