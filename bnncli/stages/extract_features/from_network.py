"""Splits whose features come out of a network: a request for each, and what makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from bnncli import data
from bnncli.artifacts.features import FeatureFile, KnownData
from bnncli.errors import DataError
from bnncli.models import SavedModel
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.options.shared import NO_NETWORK
from bnncli.session.network import recorded_checkpoint
from bnncli.session.network_fit import unlike_inputs
from bnncli.session.produce import Computed, Request, Work
from bnncli.session.run import Result, Run, own_files
from bnncli.session.splits import check_network_file, open_splits, shift_params, user_sources
from bnncli.stages.extract_features.newer_requests import settle
from bnncli.stages.extract_features.one_split import (
    finished,
    head_of,
    hold_out_seed,
    publishable,
    shift_asked,
    split_request,
    without_rows,
)
from bnncli.stages.extract_features.same_head import check_same_head
from bnncli.stages.extract_features.splits import (
    data_notes,
    input_notes,
    likelihood_of_splits,
    model_identity,
    shared_params,
)
from bnncli.stages.extract_features.unfinished import unfinished_kept
from bnncli.system.workers import crew

if TYPE_CHECKING:
    from bnncli.session.network import Network
    from bnncli.stages.extract_features.network import NetworkFeatures


@dataclass
class NetworkExtraction:
    """Splits that a user named, and the network that they go through, which is opened when there is work for it.

    Attributes:
        saved: the model of KIND:PLACE.
        opened: the network, where somebody has opened it already.
    """

    run: Run
    options: ExtractFeaturesOptions
    saved: SavedModel | None
    opened: Network | None = None
    _heads: dict[str, FeatureFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = cache(lambda name: KnownData(self.run.folder.features(name)))
        self._network = cache(self._open_network)

    @cached_property
    def splits(self) -> list[data.InputSplit]:
        """The data, opened and checked; train first. Raises what open_splits raises."""
        return open_splits(
            self.options,
            self.saved,
            seed=hold_out_seed(self.run),
            memory=self._known,
            ood=self.options.ood,
            shift=shift_asked(self.run, self.options),
            classes=self.options.class_names,
        )

    @cached_property
    def requests(self) -> list[Request]:
        """What is asked for, a request for each split."""
        run, begin = self.run, partial(check_network_file, self.options)
        params = [self._params(one) for one in self.splits]  # which refuse labels, before a checkpoint is read
        sources = [user_sources(self.options, one, self.saved) for one in self.splits]
        return [
            split_request(run, one.name, self._record, params, sources, len(one), begin)
            for one, params, sources in zip(self.splits, params, sources, strict=True)
        ]

    def result(self, *, also: Callable[[FeatureFile, dict[str, Any] | None], list[Result]]) -> Result:
        """The features of all splits, published together.

        Args:
            also: produces what else belongs with them, of the first split without its rows and the checkpoint's record.
        """

        def beside() -> list[Result]:
            return also(head_of(self.run, self.splits[0].name, self._heads), self._record)

        pairs = zip(self.splits, self.requests, strict=True)
        works = [Work(request, partial(self._extract, split, request)) for split, request in pairs]
        with unfinished_kept(self._network):
            results = settle(self.run, works, also=beside)
        for warning in () if self.run.write.dry_run else unlike_inputs(self.run, [one.name for one in self.splits]):
            self.run.console.warn(warning)
        for split in self.splits if not self.run.write.dry_run else ():
            self._known(split.name).keep()
        return finished(self.run, results)

    def better_scaling(self, name: str) -> str | None:
        """Return the scaling by which a misread split fits far better, where the network was opened for its features."""
        split = next(one for one in self.splits if one.name == name)
        return self._network().better_scaling(split) if self._network.cache_info().currsize else None

    @cached_property
    def _likelihood(self) -> str | None:
        return likelihood_of_splits(self.run, self.options, self.saved, self.splits)

    def _open_network(self) -> NetworkFeatures:
        """The network that the splits go through, its checkpoint read."""
        from bnncli.session.network import begin  # here, for torch
        from bnncli.stages.extract_features.network import NetworkFeatures

        if (others := crew()) is not None and not self.run.write.dry_run:
            begin(others)
        return NetworkFeatures(self.run, self.options, self.splits, self.saved, self._likelihood, opened=self.opened)

    @cached_property
    def _record(self) -> dict[str, Any] | None:
        """The checkpoint as provenance records it, read where it is not the one of the run's features; None without one."""
        if self.options.model == NO_NETWORK:
            return None
        run = self.run
        recorded = recorded_checkpoint(run, own_files(self.saved, run.checkpoint_path), state=self.options.state)
        if recorded is None:
            names = {split.name for split in self.splits}
            if not run.write.dry_run and not names & {*run.folder.splits()}:  # those may refuse, and that is said first
                check_network_file(self.options)
            recorded = self._network().record
        return recorded

    def _extract(self, split: data.InputSplit, request: Request) -> Computed:
        run, network = self.run, self._network()
        if network.record != self._record:
            message = f"{run.checkpoint_path} was replaced while this command ran; nothing was written"
            raise DataError(message, code="input_replaced", hint="run the command again", path=run.checkpoint_path)
        names, shared = [one.name for one in self.splits], shared_params(self.options, self.saved, self._likelihood)
        check_same_head(run, network.unread(split), names, self._record, shared)
        content, preprocess, layer, statistics = network.features(split, request)
        self._heads[split.name] = without_rows(content)
        check_same_head(run, content, names, self._record, shared)  # its labels too
        is_shifted = split.shift is not None
        computed = publishable(
            run, content, preprocess, layer, split.order_digest, split.spec, is_shifted, statistics
        )  # fmt: skip
        computed.summary.extend([*data_notes(split), *input_notes(split, content)])
        return computed

    def _params(self, split: data.InputSplit) -> dict[str, Any]:
        """What changes the numbers of one split's features."""
        options, seed = self.options, self.run.compute.seed
        return {
            **model_identity(options, self.saved),
            "mean": options.mean,
            "std": options.std,
            "resize": options.resize,
            "crop": options.crop,
            "dtype": options.dtype,
            "hold_out": split.held_out,
            "seed": seed if split.held_out or (split.shift and split.shift.is_random) else None,
            "is_ood": split.is_ood,
            **shift_params(split.shift),
            **({} if split.first_rows is None else {"first_rows": split.first_rows}),
            **({} if self._likelihood is None else {"task": self._likelihood}),
        }
