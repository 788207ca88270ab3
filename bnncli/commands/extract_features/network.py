"""Extract features by running the network over each split."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.features import DataFacts, FeatureFile, encode_names
from bnncli.commands.extract_features.splits import (
    add_head,
    check_same_head,
    check_two_classes,
    choose_class_names,
    combine_results,
    drop_rows,
    find_likelihood,
    hold_out_seed,
    keep_unfinished,
    list_data_notes,
    list_input_notes,
    model_identity,
    parse_shift,
    prepare_split,
    settle,
    shared_params,
    split_request,
    transform_json,
)
from bnncli.data.columns import PAIRS
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit
from bnncli.errors import BnnError, DataError
from bnncli.lazy import torch
from bnncli.models import PublishedModel, SavedModel
from bnncli.models.features import ExtractedFeatures, collect, describe_padding_effect
from bnncli.models.head import Head, check_link
from bnncli.names import format_names, percent
from bnncli.options.shared import NO_NETWORK
from bnncli.progress import SILENT
from bnncli.session import network as turns
from bnncli.session.network import FeatureStore, Network, find_recorded_checkpoint
from bnncli.session.network_fit import NetworkFit, describe_input_differences, fit_of
from bnncli.session.produce import ComputationOutput, Request, Work
from bnncli.session.run import Result, Run, own_files
from bnncli.session.splits import check_network_file, check_outputs, open_splits, shift_params, user_sources
from bnncli.session.unreadable import SkippedExamples
from bnncli.system.workers import Team, worker_pool

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.commands.extract_features import ExtractFeaturesOptions


_TRIED_ROWS = 256  # to find a better scaling
_MUCH_BETTER = 0.2  # gain in accuracy: at least five standard errors with that many rows
_SCALINGS = (((0,), (1,)), ((0,), (255,)), ((0,), (1 / 255,)), ((0.5,), (0.5,)))  # mean and deviation
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_MUCH = 0.1  # loss of precision, relative to the logits' spread, above which predictions change visibly


class NetworkFeatures:
    """An open network and the splits to run it over.

    Args:
        opened: the network, if it is open already.
    """

    def __init__(
        self,
        run: Run,
        options: ExtractFeaturesOptions,
        splits: list[InputSplit],
        saved: SavedModel | None,
        likelihood: str | None,
        *,
        opened: Network | None = None,
    ) -> None:
        self.options, self.splits, self.likelihood = options, splits, likelihood
        self.network = open_network(run, options, saved) if opened is None else opened
        self._stores: list[FeatureStore] = []

    @property
    def record(self) -> dict[str, Any] | None:
        """Return the checkpoint as provenance records it; None without one."""
        return self.network.record

    @cached_property
    def head(self) -> Head | None:
        """Return the last layer and note its peculiarities; None for flatten. Raises UsageError where it does not fit the task."""
        head = self.network.head(self.splits[0])
        if head is not None:
            check_outputs(self.options.task, self.likelihood, head.layout.num_outputs)
            check_link(head, self.likelihood)
            for note in head.notes:
                self.network.run.console.info(f"{head.name}: {note}")
            if head.layout.num_outputs == 1 and self.splits[0].items == "texts":
                self.network.run.console.info(
                    "the model has one output; if it is a reward model, compare pairs of texts: \0model_arg\0 pairs=yes"
                )
        return head

    def close(self) -> None:
        """Close the stores, and keep what an interrupted run needs to resume."""
        for store in self._stores:
            store.close()

    def forget(self) -> None:
        """Remove the stores once all features are published."""
        for store in self._stores:
            store.remove()

    @cached_property
    def classes(self) -> list[str]:
        """Return the names of the classes; without a head, as many as the data show."""
        if self.head is not None:
            names = choose_class_names(
                self.splits, self.head.layout.num_classes, self.network.saved, self.options.class_names
            )
            if isinstance(self.network.saved, PublishedModel) and self.network.saved.published_classes(len(names)) == (
                *names,
            ):
                self.network.run.console.info(
                    f"using the class names of the published weights: {format_names(names, limit=3)}"
                )
            return names
        names = self._classes_from_data()
        check_two_classes(self.likelihood, len(names))
        return names

    def _classes_from_data(self) -> list[str]:
        """Return the classes that the options, the data's own names or the labels show."""
        if self.options.class_names is not None:
            return list(self.options.class_names)
        named = [split for split in self.splits if split.classes and not split.is_ood]
        if named:
            return choose_class_names(self.splits, len(named[0].classes or ()), None, None)
        widths = [split.num_labels for split in self.splits if split.num_labels is not None]
        if widths:
            return [str(index) for index in range(widths[0])]
        counts = [_largest_label(split) + 1 for split in self.splits if split.is_labeled and not split.is_ood]
        return [str(index) for index in range(max([2, *counts]))]

    def unread(self, split: InputSplit) -> FeatureFile:
        """Return a split's file as known before the network runs: with head and classes, without rows and labels."""
        head = self.head
        weight, bias = (None, None) if head is None else (head.weight, head.bias)
        return FeatureFile(
            name=split.name,
            features=np.empty((0, 0), np.float32),
            labels=None,
            sample_id=np.empty(0, np.int64),
            classes=self.classes,
            head_weight=_numpy(weight),
            head_bias=_numpy(bias),
            check_logits=None,
            is_ood=split.is_ood,
            head_notes=() if head is None else head.notes,
            likelihood=self.likelihood,
        )

    def features(
        self, split: InputSplit, request: Request
    ) -> tuple[FeatureFile, dict[str, Any], str | None, dict[str, Any] | None]:
        """Run the network over one split.

        Args:
            request: request for the features. An interrupted run resumes only for the same one.

        Returns:
            The features, the preprocessing of the inputs, the name of the last layer and statistics of the inputs.
        """
        options, head, unread = self.options, self.head, self.unread(split)
        store = FeatureStore(
            self.network.run,
            request,
            dtype=getattr(torch, options.dtype),
            batch_size=options.batch_size,
            resume=options.resume,
            save_every=options.save_every,
        )
        self._stores.append(store)
        whole = self.network.features(
            split,
            head,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            dtype=options.dtype,
            store=store,
        )
        self._report(split, whole)
        content = replace(
            unread,
            features=whole.features.numpy(),
            labels=_labels(split, whole),
            sample_id=split.rows,
            check_logits=None if whole.logits is None else whole.logits.numpy(),
            names=encode_names(split.names),
            groups=split.groups,
            num_truncated=whole.num_truncated if split.items in ("texts", PAIRS, "audio") else None,
        )
        preprocess = {
            "mean": options.mean,
            "std": options.std,
            "resize": options.resize,
            "crop": options.crop,
            "interpolation": "bilinear",
            "dtype": options.dtype,
            **({"no_exif": True} if options.no_exif else {}),
            **({} if options.background is None else {"background": options.background}),
            "augment": "none",
            "hold_out": split.held_out,
            **transform_json(self.network.saved),
            **shift_params(split.shift),
            **({} if options.autocast is None else {"autocast": options.autocast}),
        }
        statistics = None if whole.inputs is None else whole.inputs.statistics()
        return content, preprocess, None if head is None else head.name, statistics

    def better_scaling(self, split: InputSplit) -> str | None:
        """Describe a mean and deviation with which a misread split fits far better; None where there is none.

        Tries the usual scalings, and the images' own mean and deviation, on at most 256 images.
        """
        rows = np.unique(np.linspace(0, len(split) - 1, num=_TRIED_ROWS).astype(np.int64))
        few, own = split.take(rows), split.preprocess
        plain = replace(few, preprocess=replace(own, mean=None, std=None))
        inputs = next(iter(plain.batches(len(rows)))).inputs
        if own.transform is not None or isinstance(inputs, dict) or inputs.ndim != 4:
            return None
        means, stds = (found.tolist() for found in (inputs.mean(dim=(0, 2, 3)), inputs.std(dim=(0, 2, 3))))
        pairs = [*_SCALINGS, *([_IMAGENET] if len(means) == 3 else [])]
        pairs += [(tuple(means), tuple(stds))] if all(value > 0 for value in stds) else []
        texts = [tuple(",".join(f"{value:.4g}" for value in values) for values in pair) for pair in pairs]
        now = self._fit_of(few)
        found = [(now, "")]
        for mean, std in texts:
            parsed = Preprocess.parse(mean=mean, std=std)
            scaled = replace(own, mean=parsed.mean, std=parsed.std)
            with suppress(BnnError):  # such as numbers that overflow
                found.append((self._fit_of(replace(few, preprocess=scaled)), f"\0mean\0 {mean} \0std\0 {std}"))
        best, words = min(found, key=lambda pair: pair[0].nll)
        is_rescaled = now.is_of_another_scale and best.nll < best.uniform_nll / 2
        if not (best.nll < now.nll and (is_rescaled or best.accuracy >= now.accuracy + _MUCH_BETTER)):
            return None
        gain = f"accuracy {percent(best.accuracy)}, NLL {best.nll:.4f}"
        return f"{words} gives {gain} on {len(rows)} rows of {split.name}"

    def _fit_of(self, split: InputSplit) -> NetworkFit:
        """Return how well the network fits a few labelled examples."""
        head = self.head
        assert head is not None
        batches = self.network.batches(
            split, head, batch_size=self.options.batch_size, dtype="float32", num_workers=0, first_row=0, num_logits=0
        )
        whole = collect(batches, len(split))
        weight, bias, labels = _numpy(head.weight), _numpy(head.bias), _labels(split, whole)
        features = whole.features.numpy()
        content = FeatureFile(
            split.name,
            features,
            labels,
            split.rows,
            self.classes,
            weight,
            bias,
            None,
            False,
            likelihood=self.likelihood,
        )
        fit = fit_of(content, is_judged=True, progress=SILENT)
        assert fit is not None
        return fit

    def _report(self, split: InputSplit, whole: ExtractedFeatures) -> None:
        """Report what lower precision, padding, scaling and resampling changed, as a warning where it is much."""
        console, loss = self.network.run.console, whole.loss
        if loss is not None:
            report = console.warn if loss.largest > _MUCH * loss.spread else console.info
            report(f"{split.name} in {self.options.autocast}: {loss}")
        stored = getattr(split.dataset, "inputs", None)
        if self.network.spec.startswith("sklearn:") and getattr(stored, "dtype", None) == np.uint8:
            console.warn(
                f"{split.name}: bytes are divided by 255, as for networks; give floats if the model was fitted "
                "differently"
            )
        if whole.num_converted:
            console.info(
                f"{split.name}: {whole.num_converted:,} of {len(split):,} clips were resampled to the model's "
                "rate (scipy.signal.resample_poly) or averaged over channels"
            )
        for note in whole.images.notes(split.name, len(split), split.preprocess):
            console.info(note)
        if (warning := describe_padding_effect(split.name, whole.padding)) is not None:
            console.warn(warning)


@dataclass
class NetworkExtraction:
    """The splits to extract, and the network to run over them, which is opened when there is work for it.

    Attributes:
        saved: model named as KIND:PLACE, if any.
        opened: the network, if it is open already.
    """

    run: Run
    options: ExtractFeaturesOptions
    saved: SavedModel | None
    opened: Network | None = None
    _heads: dict[str, FeatureFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = cache(lambda name: DataFacts(self.run.folder.features(name)))
        self._network = cache(self._open_network)

    @cached_property
    def splits(self) -> list[InputSplit]:
        """Return the splits, opened and checked, train first. Raises what open_splits raises."""
        return open_splits(
            self.options,
            self.saved,
            seed=hold_out_seed(self.run),
            memory=self._known,
            ood=self.options.ood,
            shift=parse_shift(self.run, self.options),
            classes=self.options.class_names,
            skipped=self.skipped,
        )

    @cached_property
    def skipped(self) -> SkippedExamples | None:
        """Return what notes unreadable examples; None where they are refused."""
        return SkippedExamples.asked(self.run.console, self.options, self.options.num_workers)

    @cached_property
    def requests(self) -> list[Request]:
        """Return the request of each split."""
        run, begin = self.run, partial(check_network_file, self.options)
        params = [self._params(one) for one in self.splits]  # refuses unfit labels before a checkpoint is read
        sources = [user_sources(self.options, one, self.saved) for one in self.splits]
        return [
            split_request(run, one.name, self._record, params, sources, len(one), begin)
            for one, params, sources in zip(self.splits, params, sources, strict=True)
        ]

    def result(self, *, also: Callable[[FeatureFile, dict[str, Any] | None], list[Result]]) -> Result:
        """Extract the features of all splits and publish them together.

        Args:
            also: produces further artifacts from the first split, without its rows, and the checkpoint's record.
        """

        def beside() -> list[Result]:
            return also(add_head(self.run, self.splits[0].name, self._heads), self._record)

        pairs = zip(self.splits, self.requests, strict=True)
        works = [Work(request, partial(self._extract, split, request)) for split, request in pairs]
        with keep_unfinished(self._network):
            results = settle(self.run, works, also=beside)
        for warning in (
            () if self.run.write.dry_run else describe_input_differences(self.run, [one.name for one in self.splits])
        ):
            self.run.console.warn(warning)
        for split in self.splits if not self.run.write.dry_run else ():
            self._known(split.name).keep()
        result = combine_results(self.run, results)
        if self.skipped is not None and not self.run.write.dry_run:
            self.skipped.list_in(result, lambda name: self.run.folder.features(name).with_suffix(".skipped.csv"))
        return result

    def better_scaling(self, name: str) -> str | None:
        """Describe a scaling with which a misread split fits far better; None without one, or if the network is not open."""
        split = next(one for one in self.splits if one.name == name)
        return self._network().better_scaling(split) if self._network.cache_info().currsize else None

    @cached_property
    def _likelihood(self) -> str | None:
        return find_likelihood(self.run, self.options, self.saved, self.splits)

    def _open_network(self) -> NetworkFeatures:
        """Open the network, its checkpoint read, and start the other workers."""
        from bnncli.session.network import begin  # here, for torch

        if (others := worker_pool()) is not None and not self.run.write.dry_run:
            begin(others)
        return NetworkFeatures(self.run, self.options, self.splits, self.saved, self._likelihood, opened=self.opened)

    @cached_property
    def _record(self) -> dict[str, Any] | None:
        """Return the checkpoint as provenance records it, or None. Read it only if the run's features record another one."""
        if self.options.model == NO_NETWORK:
            return None
        run = self.run
        recorded = find_recorded_checkpoint(run, own_files(self.saved, run.checkpoint_path), state=self.options.state)
        if recorded is None:
            names = {split.name for split in self.splits}
            if not run.write.dry_run and not names & {*run.folder.splits()}:  # else the existing splits refuse first
                check_network_file(self.options)
            recorded = self._network().record
        return recorded

    def _extract(self, split: InputSplit, request: Request) -> ComputationOutput:
        run, network = self.run, self._network()
        if network.record != self._record:
            message = f"{run.checkpoint_path} was replaced while this command ran; nothing was written"
            raise DataError(message, code="input_replaced", hint="run the command again", path=run.checkpoint_path)
        names, shared = [one.name for one in self.splits], shared_params(self.options, self.saved, self._likelihood)
        check_same_head(run, network.unread(split), names, self._record, shared)
        content, preprocess, layer, statistics = network.features(split, request)
        self._heads[split.name] = drop_rows(content)
        check_same_head(run, content, names, self._record, shared)  # again, now with labels
        is_shifted = split.shift is not None
        computed = prepare_split(
            run, content, preprocess, layer, split.order_digest, split.spec, is_shifted, statistics
        )
        computed.summary.extend([*list_data_notes(split), *list_input_notes(split, content)])
        return computed

    def _params(self, split: InputSplit) -> dict[str, Any]:
        """Return the parameters that change the numbers of one split's features."""
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


def _largest_label(split: InputSplit) -> int:
    """Return the largest label of a split. Takes a pass over the data where labels are known only when read."""
    if split.labels is not None:
        return int(split.labels.max())
    return max(int(batch.labels.max()) for batch in split.batches(512) if batch.labels is not None)


def _labels(split: InputSplit, whole: ExtractedFeatures) -> np.ndarray | None:
    known = split.labels if split.labels is not None else _numpy(whole.labels)
    return None if known is None or split.is_ood else known if known.ndim == 2 else known.astype(np.int64)


def _numpy(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.numpy()


def lend_to_first(run: Run, options: ExtractFeaturesOptions, saved: SavedModel | None, crew: Team) -> Result:
    """Compute features for the first process, as one of its workers. Writes and prints nothing.

    Opens the data while the first process opens them, and the network when that has work for it.

    Raises:
        BnnError: the data or the network cannot be opened, or differ from those of the first process.
    """
    splits = open_splits(
        options,
        saved,
        seed=hold_out_seed(run),
        memory=lambda name: DataFacts(run.folder.features(name)),
        ood=options.ood,
        shift=parse_shift(run, options),
        classes=options.class_names,
        skipped=SkippedExamples.asked(run.console, options, options.num_workers),
    )

    if not turns.has_begun(crew):
        return Result()
    network = open_network(run, options, saved)
    head, by_name = network.head(splits[0]), {split.name: split for split in splits}
    for order in turns.orders(crew):
        split = by_name[order.split]
        order.check(split, network.record)
        batches = partial(
            network.batches,
            split,
            head,
            batch_size=options.batch_size,
            dtype=options.dtype,
            num_workers=options.num_workers,
            first_row=order.first_row,
            num_logits=order.num_logits,
        )
        turns.lend(batches, crew)
    return Result()


def open_network(run: Run, options: ExtractFeaturesOptions, saved: SavedModel | None) -> Network:
    """Open the network and read its checkpoint. Raises what Network.of raises."""
    assert options.model is not None
    of, layer, output = options.model, options.last_layer, options.output
    network = Network.of(run, of, options.model_arg, layer, saved, output, state=options.state)
    network.autocast = options.autocast
    return network
