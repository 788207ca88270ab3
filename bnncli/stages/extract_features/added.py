"""Splits added to a run by another command than extract-features: by the network and the options that its others were made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from bnncli.artifacts.headers import interpreting
from bnncli.errors import OutputExists
from bnncli.options.command import CommandLine
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.session.network import RecordedNetwork
from bnncli.session.run import Result, Run
from bnncli.stages.extract_features.from_network import NetworkExtraction
from bnncli.stages.extract_features.newer_requests import is_of_other_data

_OF_A_SPLIT = {"hold_out", "rotate", "corrupt"}  # recorded of the split that they were given for, and of no other


class AddedSplits:
    """Splits of a run, as `extract-features` with the options of its others writes them.

    Args:
        recorded: the network that the run's features were made by.
        data, ood: the splits, each as SPLIT=SPEC.
    """

    def __init__(self, run: Run, recorded: RecordedNetwork, *, data: Sequence[str], ood: Sequence[str]) -> None:
        options = replace(_options_of(recorded), data=[*data], ood=[*ood])
        line = CommandLine.of("extract-features", str(run.arguments["ckpt"]), options)
        maker = replace(run, command=line.command, line=line)
        self._recorded, network = recorded, recorded.network
        self._extraction = NetworkExtraction(maker, options, network.saved, opened=network)
        self.splits = self._extraction.splits

    def check_replaces_none(self) -> None:
        """Raise OutputExists where the run has a split of such a name, of other data: what was made with it would be stale."""
        for request in self._extraction.requests:
            if is_of_other_data(request):
                message = f"the run already has a split {request.target.stem!r} with other data: {request.target}"
                hint = "give the new data another name; only extract-features replaces splits"
                raise OutputExists(message, hint=hint, path=request.target)

    def result(self) -> Result:
        """Their features, published together. Raises what extract-features raises."""
        with self._recorded.visible():
            return self._extraction.result(also=lambda first, record: [])


def _options_of(recorded: RecordedNetwork) -> ExtractFeaturesOptions:
    """What the run's features were asked for with, but for their data."""
    with interpreting(recorded.header.path):
        params: Mapping[str, Any] = recorded.header.provenance["params"]
        names = {spec.name for spec in fields(ExtractFeaturesOptions)} & {*params} - _OF_A_SPLIT
        asked = {name: params[name] for name in names if params[name] is not None}
        placeholder = {"data": ["\0"]}  # a network is asked for with data
        return ExtractFeaturesOptions(**asked | placeholder | {"model": recorded.network.spec})
