"""Check the splits of extract-features against the model and the run, and publish them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.atomic import check_free_space
from bnncli.artifacts.features import FeatureFile, check_split, head_digest, read_features, write_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import (
    SHARED_PARAMS,
    UNFINISHED,
    differing_names,
    remove_note,
    request_digest,
    write_note,
)
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.posteriors import PREPROCESSING, RECORDED_NETWORK, read_trained_header
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.run_folder import folder_error
from bnncli.commands.inspect import NETWORK, recognise_model
from bnncli.data.labels import alphabetical_numbering, columns_of_classes, common_task, is_multi_label
from bnncli.data.shift import Shift
from bnncli.data.splits import InputSplit
from bnncli.errors import NOT_OF_CONTENT, BnnError, DataError, UsageError
from bnncli.likelihoods import BINARY, MULTILABEL, read_recorded_name
from bnncli.models import PublishedModel, SavedModel, is_kind
from bnncli.models.output_folders import choose_checkpoint
from bnncli.models.sharded import find_sharded_folder
from bnncli.numerics.random import stream_seed
from bnncli.options.command import CommandLine
from bnncli.options.declaration import spell_options
from bnncli.options.shared import EITHER, NO_NETWORK
from bnncli.registry import own_names
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import run_classes
from bnncli.session.network_fit import fit_of
from bnncli.session.produce import ComputationOutput, Request, Work, produce_together
from bnncli.session.run import Result, Run, open_requested_model
from bnncli.session.splits import describe_shared_rows, shift_of

if TYPE_CHECKING:
    from bnncli.commands.extract_features import ExtractFeaturesOptions
    from bnncli.commands.extract_features.network import NetworkFeatures


@contextmanager
def suggest_own_model(run: Run, options: ExtractFeaturesOptions) -> Iterator[None]:
    """Replace an error's hint by the command that runs the model, if CKPT is a complete model instead of weights."""
    try:
        yield
    except BnnError as error:
        line = _own_model_line(run, options) if error.path == str(run.arguments["ckpt"]) else None
        if line is None:
            raise
        raise type(error)(error.message, hint=line.pasted(), code=error.code, path=error.path) from error


# Options that need a network in code, and options that need inputs without the network's own preprocessing.
_OF_CODE = ("model_arg", "last_layer", "output", "state", "base_model", "feature_node")
_OF_ARRAYS = ("mean", "std", "resize", "crop")
_WITH_TRANSFORM = ("hf", "peft", "timm")


def _own_model_line(run: Run, options: ExtractFeaturesOptions) -> CommandLine | None:
    """Return the command with CKPT as its own model; None where CKPT is not recognised or is named already."""
    path = Path(run.arguments["ckpt"])
    found = recognise_model(path) if path.exists() else None
    if found is None or not is_kind(found[0]) or found[0] == options.model:
        return None
    if found[0].partition(":")[2] != str(path):  # CKPT holds weights for that network
        return None
    line = run.line.having("model", found[0])
    for name in (*_OF_CODE, *(_OF_ARRAYS if found[0].partition(":")[0] in _WITH_TRANSFORM else ())):
        line = line.having(name, None)
    return line


_OF_SAVED_MODELS = ("base_model", "feature_node")


def open_saved_model(run: Run, options: ExtractFeaturesOptions) -> SavedModel | None:
    """Open a model named as KIND:PLACE; return None for any other. Raises what open_model raises."""
    if options.model is None and options.from_npz is None:
        raise _no_model_error(run, options)
    asked = {name: getattr(options, name) for name in _OF_SAVED_MODELS}
    return open_requested_model(options.model, options.model_arg, **asked, allow_download=options.allow_download)


def _no_model_error(run: Run, options: ExtractFeaturesOptions) -> UsageError:
    """Return the error of a command without a network. Its hint is a command that works, if the checkpoint tells."""
    path = Path(run.arguments["ckpt"])
    is_complete = bool(options.data or options.ood)
    trained = _own_code_line(run)
    if trained is not None:
        message = (
            f"{path.name} was trained with a network from your own code; to run it, name the network with \0model\0"
        )
        return UsageError(message, hint=trained.pasted() + ("" if is_complete else " \0data\0 SPLIT=SPEC"))
    found = recognise_model(path) if path.exists() else None
    choice = choose_checkpoint(path) if path.is_dir() else None
    if choice is not None and choice.path.is_file():
        line = run.line.of_checkpoint(str(choice.path)).having("model", NETWORK if found is None else found[0])
        return UsageError(EITHER, hint=(line if is_complete else line.having("data", ["train=SPEC"])).pasted())
    if found is None:
        is_output = path.is_dir() and (choice or find_sharded_folder(path))
        return UsageError(EITHER, hint=folder_error(path).hint if is_output else None)
    model, suggested = found
    return UsageError(EITHER, hint=run.line.having("model", model).pasted() if is_complete else suggested)


def _own_code_line(run: Run) -> CommandLine | None:
    """Return the command with the user's own network that train recorded; None where the checkpoint records none."""
    header = read_trained_header(Path(run.arguments["ckpt"]))
    if header is None:
        return None
    line = run.line
    for name, value in _recorded_options(header).items():
        line = line if line.gives(name) else line.having(name, value)
    return line


def choose_class_names(
    splits: list[InputSplit], num_classes: int, saved: SavedModel | None, given: tuple[str, ...] | None
) -> list[str]:
    """Return the names given, else the model's, the data's or the published weights', else 0, 1, 2, ...

    Raises:
        UsageError: the number of given names is not that of the network's classes, or they are the model's in another order.
        DataError: the number of the model's or the data's names is not that of the network's classes.
    """
    if given is not None:
        if len(given) != num_classes:
            raise UsageError(
                f"\0classes\0: expected {num_classes} names, one per output of the network; got {len(given)}"
            )
        if saved is not None and saved.classes is not None and {*given} == {*saved.classes} and given != saved.classes:
            raise UsageError(
                "\0classes\0: these are the model's own classes in another order",
                hint=f"the model's order: {','.join(saved.classes)}",
            )
        return list(given)
    if saved is not None and saved.classes is not None:
        if len(saved.classes) != num_classes:
            message = f"the model names {len(saved.classes)} classes, but its last layer has {num_classes}"
            raise DataError(message, code="class_mismatch")
        return list(saved.classes)
    named = {split.name: list(split.classes) for split in splits if split.classes and not split.is_ood}
    for name, own in named.items():
        if len(own) != num_classes:
            raise DataError(
                f"split {name!r} has {len(own)} classes, but the network has {num_classes} outputs", code="class_mismatch",
                hint="name all of them in the order of the network's outputs: \0classes\0 FILE or a,b,c",
            )  # fmt: skip
    if named:
        return next(iter(named.values()))
    published = saved.published_classes(num_classes) if isinstance(saved, PublishedModel) else None
    return [str(index) for index in range(num_classes)] if published is None else list(published)


def list_data_notes(split: InputSplit) -> list[str]:
    """Return notes on files left out, rows without labels, how class names were numbered, and columns that look like labels."""
    note = getattr(split.dataset, "note", "")
    return [*([f"{split.name}: {note}"] if note else []), *_label_notes(split)]


def _label_notes(split: InputSplit) -> list[str]:
    if (order := alphabetical_numbering(split)) is not None:
        return [f"{order}; set another order with \0classes\0 FILE or a,b,c"]
    columns = "+".join(columns_of_classes(split))
    note = (
        f"{split.name}: no label columns were named, but some columns have the model's class names; to use them as "
        f"labels, add label={columns}"
    )
    return [note] if columns else []


def list_input_notes(split: InputSplit, content: FeatureFile) -> list[str]:
    """Return notes on inputs that the model's own preprocessing truncated or passed through."""
    transform = split.preprocess.transform
    if transform is None:
        return []
    if getattr(getattr(split.dataset, "inputs", None), "dtype", np.dtype(np.uint8)).kind == "f":
        return [
            f"{content.name}: the inputs are floats and are used unchanged: the model's preprocessing expects "
            f"{transform.takes}"
        ]
    if not content.num_truncated:
        return []
    what, own = "clips" if split.items == "audio" else split.items, transform.to_json()
    limit = own.get("max_length")
    longer = "than the model takes" if limit is None else f"than {limit} tokens"
    if limit is not None and "sampling_rate" in own:
        longer = f"than {limit / own['sampling_rate']:.3g} s"
    return [
        f"{content.name}: {content.num_truncated:,} of {len(split):,} {what} were longer {longer} and were truncated"
    ]


def find_likelihood(
    run: Run,
    options: ExtractFeaturesOptions,
    saved: SavedModel | None,
    splits: list[InputSplit],
) -> str | None:
    """Return the likelihood's name, from --task, the model, the labels or the run's other splits.

    Raises:
        DataError: labels contradict the task, or fit several.
    """
    labels = {split.spec: split.shown_labels for split in splits if split.is_labeled}
    model_task = None if saved is None or options.task is not None else saved.task
    task = options.task or (MULTILABEL if model_task == MULTILABEL else None)
    if model_task is not None:
        _check_model_task(model_task, labels)
    found = common_task(labels, task)
    if task == BINARY and options.model == NO_NETWORK:
        return BINARY
    return found if task is not None else choose_likelihood(run, found, [split.name for split in splits], labels)


def _check_model_task(task: str, labels: Mapping[str, np.ndarray | None]) -> None:
    """Raise DataError where the labels do not fit the task that the model was trained for."""
    for where, array in labels.items():
        if task == MULTILABEL and array is not None and array.ndim == 1:
            raise DataError(
                f"{where}: examples have one class, but the model was trained for several labels",
                hint="name one column per label (label=A+B), or add \0task\0 multiclass",
                code="bad_labels",
            )
        if task == "multiclass" and is_multi_label(array):
            raise DataError(
                f"{where}: examples have several labels, but the model was trained for one class",
                hint=f"add \0task\0 {MULTILABEL} to treat each output as its own label",
                code="bad_labels",
            )


def choose_likelihood(run: Run, found: str | None, names: Collection[str], labels: Collection[object]) -> str | None:
    """Return the likelihood `found` from the labels, if there are any, else that of the run's other splits."""
    of_run = read_likelihood(run, names)
    return found if labels and of_run != BINARY else of_run


def read_likelihood(run: Run, without: Collection[str]) -> str | None:
    """Return the likelihood's name that a run's other splits record; None where they record none."""
    for name in run.folder.splits():
        if name not in without:
            try:
                found = read_recorded_name(read_header(run.folder.features(name)).meta)
            except NOT_OF_CONTENT:
                raise
            except BnnError:  # reported by commands that use that split
                continue
            if found is not None:
                return found
    return None


def check_two_classes(likelihood: str | None, num_classes: int) -> None:
    """Raise UsageError where the task is binary and there are not two classes."""
    if likelihood == BINARY and num_classes != 2:
        raise UsageError(f"\0task\0 binary: expected labels 0 and 1; got {num_classes} classes")


def shared_params(options: ExtractFeaturesOptions, saved: SavedModel | None, likelihood: str | None) -> dict[str, Any]:
    """Return the options that all splits of a run must share."""
    own = {**model_identity(options, saved), "task": likelihood}
    return {name: own[name] if name in own else getattr(options, name, None) or None for name in SHARED_PARAMS}


# Options that change numbers, recorded where they are given.
_WHERE_GIVEN = (*_OF_SAVED_MODELS, "output", "state", "autocast", "no_exif", "background")


def model_identity(options: ExtractFeaturesOptions, saved: SavedModel | None) -> dict[str, Any]:
    """Return what defines the network: its name, arguments, layer and preprocessing."""
    return {
        "model": options.model,
        "model_arg": sorted(options.model_arg),
        "last_layer": options.last_layer,
        **{name: getattr(options, name) for name in _WHERE_GIVEN if getattr(options, name) not in (None, False)},
        **({} if options.classes is None else {"classes": "\n".join(options.class_names or ())}),
        **transform_json(saved),
    }


def transform_json(saved: SavedModel | None) -> dict[str, Any]:
    """Return the model's own preprocessing for params and provenance; empty without one."""
    return {} if saved is None or saved.transform is None else {"transform": saved.transform.to_json()}


def hold_out_seed(run: Run) -> int:
    """Return the seed for the rows that --hold-out moves."""
    return stream_seed(run.compute.seed, "extract-features/hold-out")


def parse_shift(run: Run, options: ExtractFeaturesOptions) -> Shift | None:
    """Return the rotation or corruption of the images; None without one."""
    return shift_of({"rotate": options.rotate, "corrupt": options.corrupt, "seed": run.compute.seed})


def split_request(
    run: Run,
    name: str,
    checkpoint: dict[str, Any] | None,
    params: dict[str, Any],
    sources: list[Source],
    num_examples: int,
    begin: Callable[[], object] = lambda: None,
) -> Request:
    """Return the request for one split's features.

    Args:
        begin: called before features are computed.
    """
    target = run.folder.features(name)
    return Request(
        target,
        "features",
        f"features.{name}",
        params,
        _revisions.EXTRACT_FEATURES,
        sources,
        checkpoint,
        lambda: num_examples * 64,
        begin=begin,
    )


def prepare_split(
    run: Run,
    content: FeatureFile,
    preprocess: dict[str, Any],
    layer: str | None,
    order_digest: str,
    source: str,
    is_shifted: bool = False,
    input_statistics: dict[str, Any] | None = None,
) -> ComputationOutput:
    """Check a split, measure how well the network fits its labels, and return it ready to be published."""
    target = run.folder.features(content.name)
    check_split(target, content)
    check_free_space(target.parent, content.features.nbytes)
    fit = fit_of(content, is_judged=not is_shifted, progress=run.console)
    in_groups = "" if content.groups is None else f" in {len(np.unique(content.groups))} groups"
    summary = [
        f"{content.name}: {len(content.features)} examples{in_groups}, {content.features.shape[1]} features"
        + ("" if content.labels is not None else ", no labels")
    ]

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_features(
            target,
            content,
            preprocess=preprocess,
            layer=layer,
            order_digest=order_digest,
            source=source,
            provenance=provenance,
            may_replace=may_replace,
            network_fit=None if fit is None else fit.to_json(),
            input_statistics=input_statistics,
        )

    return ComputationOutput(publish, summary=summary)


def drop_rows(content: FeatureFile) -> FeatureFile:
    """Return a split's head, classes and width, without its examples."""
    return replace(
        content, features=content.features[:0].copy(), labels=None, names=None, groups=None, sample_id=np.empty(0)
    )


def add_head(run: Run, split: str, made: Mapping[str, FeatureFile]) -> FeatureFile:
    """Return a split with its head, as this command made it or as the run has it."""
    return made[split] if split in made else read_features(run.folder.features(split))


def combine_results(run: Run, results: list[Result]) -> Result:
    """Return all results as one. Warn where two splits of the run share rows."""
    total = Result()
    for result in results:
        total.add(result)
    if not run.write.dry_run:
        for text in describe_shared_rows(run.folder):
            run.console.warn(text)
    if total.action == "up_to_date" and len(total.outputs) > 1:
        total.summary = [f"all {len(total.outputs)} artifacts are up to date"]
    return total


def note_changed(run: Run, requests: Sequence[Request]) -> None:
    """Leave a note beside existing features of other data, before any of them are replaced."""
    for request in requests:
        if is_of_other_data(request):
            _note(run, request, UNFINISHED)


def settle(run: Run, works: Sequence[Work], *, also: Callable[[], list[Result]]) -> list[Result]:
    """Produce all works together and remove the notes; on an error, record it in the notes.

    While the files take their names, a note lies beside each file that is replaced. If the command is killed in between, the splits
    come from two requests, and the notes tell which is which.
    """
    requests = [work.request for work in works if work.request.kind == "features"]
    digests = {one.target: request_digest(one.params, one.sources) for one in requests}
    earlier: dict[Path, int | None] = {}

    def before(targets: Sequence[Path]) -> None:
        earlier.update({target: _read_inode(target) for target in targets})
        together = {target.stem: digests[target] for target in targets if target in digests}
        for target in targets if len(targets) > 1 else ():
            if target in digests and target.is_file():
                write_note(target, reason=UNFINISHED, request=digests[target], together=together)

    try:
        results = produce_together(run, works, also=also, before=before)
    except BnnError as error:
        if all(_read_inode(target) == number for target, number in earlier.items()):  # no file has its name
            _note_failures(run, requests, error.message, noted=earlier)
        raise
    if not run.write.dry_run:
        for request in requests:
            remove_note(request.target)
    return results


def _read_inode(target: Path) -> int | None:
    return target.stat().st_ino if target.exists() else None


def _note_failures(run: Run, requests: Sequence[Request], reason: str, *, noted: Collection[Path]) -> None:
    """Record in the notes why newer data were not extracted, and remove notes about anything else."""
    for request in requests:
        if is_of_other_data(request):
            _note(run, request, reason)
        elif request.target in noted:
            remove_note(request.target)


def is_of_other_data(request: Request) -> bool:
    """True where features of other data than requested exist."""
    if not request.target.is_file():
        return False
    try:
        header = read_header(request.target)
    except NOT_OF_CONTENT:
        raise
    except BnnError:  # no readable features
        return False
    then = {entry["role"]: entry["content_digest"] for entry in header.inputs}
    return any(then.get(one.role) != one.content_digest for one in request.sources if one.role.startswith("data."))


def _note(run: Run, request: Request, reason: str) -> None:
    if run.write.dry_run:
        return
    digest = request_digest(request.params, request.sources)
    try:
        write_note(request.target, reason=spell_options(reason), request=digest)
    except BnnError as error:  # the command's own error matters more
        run.console.warn(f"cannot record that newer data were requested: {error.message}")


@contextmanager
def keep_unfinished(network: _lru_cache_wrapper[NetworkFeatures]) -> Iterator[None]:
    """Keep what is not published for --resume, and remove it once the block has published everything.

    Args:
        network: cached function that opens the network.
    """
    try:
        yield
    finally:
        if network.cache_info().currsize:
            network().close()
    if network.cache_info().currsize:
        network().forget()


_TASKS = {None: "one class per example", MULTILABEL: "several labels per example", BINARY: "two classes from one logit"}


def check_same_head(
    run: Run, content: FeatureFile, names: list[str], record: dict[str, Any] | None, shared: dict[str, Any]
) -> None:
    """Check that the run's other splits, unless stale, have the same head, classes and preprocessing.

    Raises:
        DataError: they differ.
    """
    weights_digest = record["weights_digest"] if record else None
    for name in sorted({*run.folder.splits()} - {*names}):
        path = run.folder.features(name)
        header = read_header(path)
        if header.weights_digest == weights_digest and read_recorded_name(header.meta) != content.likelihood:
            there, here = (_TASKS[one] for one in (read_recorded_name(header.meta), content.likelihood))
            raise DataError(
                f"split {name!r} of this run has {there}, but the new one has {here}",
                code="mixed_options",
                path=path,
                hint="give --task, extract all splits in one command with --force, or use another --run-dir",
            )
        theirs = header.provenance.get("params", {})
        if header.weights_digest != weights_digest and theirs.get("state") == shared.get("state"):
            continue
        for differing in differing_names(theirs, shared):
            what = "model preprocessing" if differing == "transform" else f"--{differing.replace('_', '-')}"
            raise DataError(
                f"split {name!r} of this run was extracted with another {what} (then {theirs.get(differing)}, now "
                f"{shared[differing]})",
                code="mixed_options",
                path=path,
                hint="use the same options, extract all splits in one command with --force, or use another --run-dir",
            )
        if header.meta.get("head_digest") != head_digest(content):
            raise DataError(
                f"split {name!r} of this run has another head than the new one",
                code="wrong_head",
                path=path,
                hint="extract all splits in one command with --force, or use another --run-dir",
            )
    run_classes(run.folder, content, weights_digest=weights_digest, without=names)


def fill_in_recorded(run: Run, options: ExtractFeaturesOptions) -> ExtractFeaturesOptions:
    """Fill in the network and preprocessing that the checkpoint records, where no network is named.

    Names in a file are never run as code: the user has to name a network of their own. Warns where a named network gets inputs with
    other preprocessing than in training.
    """
    header = read_trained_header(Path(run.arguments["ckpt"])) if options.from_npz is None else None
    if header is None:
        return options
    recorded = _recorded_options(header)
    if options.model is None and recorded["model"] in own_names("networks"):
        given = {name: getattr(options, name) for name in (*PREPROCESSING, "model_arg")}
        run.console.info(f"{header.path.name} was trained with {_describe(recorded)}")
        return replace(options, **{name: value for name, value in recorded.items() if not given.get(name)})
    if options.model is not None:
        differing = [name for name in PREPROCESSING if getattr(options, name) != recorded[name]]
        for name in differing:
            run.console.warn(
                f"{header.path.name} was trained with \0{name}\0 {recorded[name] or 'unset'}; you asked for "
                f"{getattr(options, name) or 'none'}"
            )
    return options


def _recorded_options(header: Header) -> dict[str, Any]:
    with convert_lookup_errors(header.path):
        params = header.provenance["params"]
        return {name: params[name] for name in RECORDED_NETWORK}


def _describe(recorded: dict[str, Any]) -> str:
    """Describe the network and its preprocessing."""
    words = [str(recorded["model"]), *map(str, recorded["model_arg"])]
    words += [f"{name} {recorded[name]}" for name in PREPROCESSING if recorded[name] is not None]
    return ", ".join(words)
