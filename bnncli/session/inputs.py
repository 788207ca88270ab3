"""Read feature splits and posteriors of the run, and check that they are fresh and from its checkpoint."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bnncli import registry
from bnncli.artifacts.features import FeatureFile, SplitClasses, head_digest, read_classes, read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import read_posterior, read_tensor
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.run_folder import RunFolder
from bnncli.artifacts.samples import SampleFile, read_constant, read_samples
from bnncli.errors import NOT_OF_CONTENT, BnnError, DataError, MissingInput
from bnncli.evaluation.groups import RowGroups
from bnncli.inference import memory
from bnncli.lazy import torch
from bnncli.likelihoods import BINARY, read_recorded_name
from bnncli.numerics.digests import json_sha256
from bnncli.parameters.layouts import ClassifierLayout, HeadLayout
from bnncli.parameters.module import ModuleLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.samples import Samples
from bnncli.session.run import Run
from bnncli.system.devices import available_memory

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.artifacts.headers import Header
    from bnncli.artifacts.provenance import Source
    from bnncli.parameters.prior import Prior
    from bnncli.posteriors.point import Point
    from bnncli.session.run import Run
    from bnncli.targets.last_layer import LastLayerTarget


_HINT = "extract all splits in one command with \0force\0, or use another \0run_dir\0"


class RunClasses(NamedTuple):
    """Class names by label, and the feature file they come from; None for the split's own file."""

    names: list[str]
    path: Path | None


def run_classes(
    folder: RunFolder, split: FeatureFile, *, weights_digest: str | None, without: Collection[str] = ()
) -> RunClasses:
    """Return the classes of the run that a split belongs to.

    Args:
        weights_digest: of the checkpoint the split was extracted with; None without one.
        without: splits of the run to ignore because they are being replaced.

    Raises:
        DataError: the split's class names differ from the run's, or a label is out of range.
    """
    path = folder.features(split.name)
    own = SplitClasses(split.classes, split.labels is not None and not split.is_ood)
    asked = {path: own} | _others(folder, split, weights_digest, {*without, split.name})
    source = _source(asked)
    names = asked[source].names
    if not own.is_numbered and own.names != names:
        odd = sorted({*own.names} ^ {*names})[:5]
        differs = f"first differences: {odd}" if odd else "the same names in a different order"
        raise DataError(
            f"splits {source.stem!r} and {split.name!r} of this run have different classes ({differs})",
            code="class_mismatch",
            hint=_HINT,
            path=path,
        )
    if split.labels is not None and split.labels.ndim == 2 and split.labels.shape[1] != len(names):
        raise DataError(
            f"split {split.name!r} has {split.labels.shape[1]} labels per example, but split {source.stem!r} of "
            f"this run has {len(names)} classes",
            code="class_mismatch",
            hint=_HINT,
            path=path,
        )
    if split.labels is not None and split.labels.ndim == 1 and int(split.labels.max()) >= len(names):
        raise DataError(
            f"split {split.name!r} has labels up to {int(split.labels.max())}, but split {source.stem!r} of this "
            f"run has {len(names)} classes",
            code="class_mismatch",
            hint=_HINT,
            path=path,
        )
    return RunClasses(names, None if names == own.names else source)


def posterior_classes(folder: RunFolder, header: Header) -> list[str]:
    """Return the classes a posterior was fitted to; replace numbers by names that a later split has."""
    own = SplitClasses([str(name) for name in header.meta.get("classes", [])], is_labeled=True)
    for name in folder.splits() if own.is_numbered else []:
        try:
            theirs, classes = read_classes(folder.features(name))
        except NOT_OF_CONTENT:
            raise
        except BnnError:  # reported when that split is loaded
            continue
        is_kin = theirs.weights_digest == header.weights_digest and len(classes.names) == len(own.names)
        if is_kin and not classes.is_numbered:
            return classes.names
    return own.names


def _source(asked: dict[Path, SplitClasses]) -> Path:
    """Return the file that defines the run's classes.

    It is the first with class names, train before others; else labelled train; else the file with the most classes.
    """
    order = sorted(asked, key=lambda one: (one.stem != "train", one.name))
    for one in order:
        if not asked[one].is_numbered:
            return one
    labeled = [one for one in order if asked[one].is_labeled] or order
    return labeled[0] if labeled[0].stem == "train" else max(labeled, key=lambda one: len(asked[one].names))


def _others(
    folder: RunFolder, split: FeatureFile, weights_digest: str | None, without: Collection[str]
) -> dict[Path, SplitClasses]:
    """Return the classes of the run's other splits that have the same head."""
    digest, found = head_digest(split), {}
    for name in folder.splits():
        if name in without:
            continue
        try:
            header, classes = read_classes(folder.features(name))
        except NOT_OF_CONTENT:
            raise
        except BnnError:  # reported when that split is loaded
            continue
        if _is_kin(header, digest, weights_digest):
            found[folder.features(name)] = classes
    return found


def _is_kin(header: Header, digest: str, weights_digest: str | None) -> bool:
    return header.weights_digest == weights_digest and header.meta.get("head_digest") == digest


RESIDENT_SHARE = 0.25  # share of free GPU memory for a split's features; system.memory.SHARE covers the rest


PREDICTION_BYTES = 1 << 30  # features that predict holds on the device at once; fixed, because sums depend on it


@dataclass(frozen=True)
class Split:
    """A feature split: its content, its identity and its checkpoint's record.

    Attributes:
        classes_source: the file of the class names if it is another split's.
        also: further sources of rows joined from several splits.
    """

    content: FeatureFile
    source: Source
    checkpoint: dict[str, Any] | None
    classes_source: Source | None = None
    also: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the sources of the rows."""
        return self.source, *self.also

    @property
    def layout(self) -> HeadLayout:
        """Return the layout of the head.

        Without a head: one output per class, or one output for two classes if the run says binary, and a bias.
        """
        weight, name = self.content.head_weight, self.content.likelihood
        if name == BINARY:
            return HeadLayout(1, self.content.features.shape[1])
        if weight is None:
            return HeadLayout(len(self.content.classes), self.content.features.shape[1], likelihood_name=name)
        return HeadLayout(weight.shape[0], weight.shape[1], self.content.head_bias is not None, name)

    def features(self, device: torch.device) -> Tensor:
        """Return the features (N, D) float32 on the device; on the CPU, memory-mapped if stored as float32."""
        return torch.from_numpy(self.content.features).to(device=device, dtype=torch.float32)

    def resident(self, device: torch.device) -> Tensor:
        """Return the stored features (N, D), on the device if they leave enough room, else memory-mapped."""
        features = torch.from_numpy(self.content.features)
        return features.to(device) if features.nbytes <= RESIDENT_SHARE * available_memory(device) else features

    @property
    def name(self) -> str:
        """Return the name of the split."""
        return self.content.name

    @property
    def groups(self) -> RowGroups | None:
        """Return the groups of dependent rows, or None."""
        return RowGroups.of(self.content.groups)

    @property
    def is_last_layer(self) -> bool:
        """Return whether posteriors are over the last layer, with features as inputs."""
        return True

    @property
    def stored(self) -> Tensor:
        """Return the stored features (N, D), memory-mapped."""
        return torch.from_numpy(self.content.features)

    def feature_blocks(self, device: torch.device, rows: slice = slice(None)) -> Iterator[Tensor]:
        """Yield blocks (n, D) float32 of all or some features on the device; most splits are one block."""
        return feature_blocks(torch.from_numpy(self.content.features)[rows], device)

    def logits(self, point: Point, device: torch.device) -> Tensor:
        """Return the logits (N, K) float32 at a point, on the device, as predict computes them."""
        stacked = point.theta.to(device, torch.float32).unsqueeze(0)
        blocks = [point.layout.logits(features, stacked)[0] for features in self.feature_blocks(device)]
        return torch.cat(blocks)

    def labels(self, device: torch.device) -> Tensor:
        """Return the labels, (N,) int64 or (N, C) uint8, on the device.

        Raises:
            DataError: the split has no labels.
        """
        if self.content.labels is None:
            raise DataError(f"split {self.content.name!r} has no labels, which are needed here", code="no_labels")
        return torch.from_numpy(self.content.labels).to(device)

    def take(self, rows: Tensor) -> Split:
        """Return the split restricted to the rows (n,)."""
        index, content = rows.cpu().numpy(), self.content
        labels = None if content.labels is None else content.labels[index]
        groups = None if content.groups is None else content.groups[index]
        some = replace(content, features=content.features[index], labels=labels, sample_id=content.sample_id[index])
        return replace(self, content=replace(some, names=None, groups=groups))

    def check_labeled(self) -> Split:
        """Return the split itself.

        Raises:
            DataError: the split has no labels.
        """
        if self.content.labels is None:
            raise DataError(f"split {self.content.name!r} has no labels, which are needed here", code="no_labels")
        return self

    def check_fits(self, layout: ClassifierLayout) -> None:
        """Check that a posterior with this layout fits the split's features and classes.

        Raises:
            DataError: it does not.
        """
        name, num_classes = self.content.name, len(self.content.classes)
        if self.content.head_weight is not None and not layout.can_replace(self.layout):
            raise DataError(f"the posterior takes {layout}, but split {name!r} has {self.layout}", code="wrong_layout")
        if layout.num_classes != num_classes:
            message = f"split {name!r} has {num_classes} classes, but the posterior has {layout.num_classes}"
            raise DataError(message, code="class_mismatch")
        if layout.num_features != self.content.features.shape[1]:
            message = (
                f"split {name!r} has {self.content.features.shape[1]} features, but the posterior takes "
                f"{layout.num_features}"
            )
            raise DataError(message, code="wrong_layout")

    def target(self, prior: Prior, device: torch.device) -> LastLayerTarget:
        """Return the log posterior of the head given this split."""
        from bnncli.targets.last_layer import LastLayerTarget

        return LastLayerTarget(self.resident(device), self.labels(device), self.layout, prior)

    def head(self) -> Tensor | None:
        """Return theta (P,) float64 of the trained network; None without a head."""
        return head_theta(self.content.head_weight, self.content.head_bias)

    def start(self) -> Tensor:
        """Return the starting point of the mode search: the network's head, or zeros without one."""
        head = self.head()
        return torch.zeros(self.layout.num_params, dtype=torch.float64) if head is None else head


def feature_blocks(features: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Yield features (N, ...) block by block, float32 on the device; most fit in one block."""
    return (on_device(features[rows], device) for rows in block_rows(features, slice(0, len(features))))


def block_rows(features: Tensor, rows: slice) -> list[slice]:
    """Return the blocks of some rows of features (N, ...); one empty block if there are no rows."""
    size = max(1, PREDICTION_BYTES // (4 * features[:1].numel() or 1))
    starts = range(rows.start, max(rows.stop, rows.start + 1), size)
    return [slice(start, min(start + size, rows.stop)) for start in starts]


def on_device(features: Tensor, device: torch.device) -> Tensor:
    """Move features (n, ...) to the device as float32; token ids keep their type."""
    return features.to(device=device, dtype=torch.float32 if features.is_floating_point() else features.dtype)


def head_theta(weight: np.ndarray | None, bias: np.ndarray | None) -> Tensor | None:
    """Return theta (P,) float64 from a weight (K, D) and a bias (K,); None without a weight."""
    if weight is None:
        return None
    layout = HeadLayout(weight.shape[0], weight.shape[1], has_bias=bias is not None)
    return layout.join(torch.from_numpy(weight).double(), None if bias is None else torch.from_numpy(bias).double())


def load_split(run: Run, name: str) -> Split:
    """Load the features of a split of the run.

    Raises:
        MissingInput: there is no such split; names the command that creates it and the available splits.
        DataError: the features are damaged, from another checkpoint, or stale because a newer extraction failed.
    """
    path = run.folder.features(name)
    if not path.is_file():
        if not run.folder.root.exists() and not run.checkpoint_path.exists():
            raise run.no_run()
        there = run.folder.splits()
        near = difflib.get_close_matches(name, there, n=1)
        has = f"have: {', '.join(there)}" if there else "no splits yet"
        has += f"; did you mean {near[0]!r}?" if near else ""
        raise MissingInput(
            f"no features of split {name!r} for {run.checkpoint_path} (looked for {path}; {has})",
            hint=run.suggest(
                "extract-features",
                model="MODEL",
                data=[f"{one}=SPEC" for one in ([name] if there else ["train", "test"])],
            ),
            path=path,
        )
    content = read_features(path)
    assert content.header is not None
    if content.name != name:
        raise DataError(
            f"{path} holds the features of split {content.name!r}, not {name!r}",
            code="wrong_split",
            hint="rename the file to match its split, and extract the other split again",
            path=path,
        )
    run.use(content.header)
    checkpoint = run.belongs(content.header)
    identity = f"{head_digest(content)} {content.likelihood}"
    first = run.heads.setdefault("head", (name, identity))
    if first[1] != identity:
        raise DataError(
            f"splits {first[0]!r} and {name!r} have different heads, so they come from different networks",
            code="wrong_head",
            hint="extract all splits again in one command, with \0force\0",
            path=path,
        )
    classes = run_classes(run.folder, content, weights_digest=content.header.weights_digest)
    named = None
    if classes.path is not None:
        named = Source("classes", classes.path, f"sha256:{json_sha256(classes.names)}", is_artifact=False)
    source = Source(f"features.{name}", path, content.header.content_digest)
    return Split(replace(content, classes=classes.names), source, checkpoint, named)


def posterior_source(run: Run, path: Path, role: str) -> tuple[Header, Source]:
    """Return header and identity of a posterior file after checking that it is fresh and from this run's checkpoint."""
    header = read_header(path)
    if header.kind not in ("posterior", "samples"):
        raise DataError(f"{path}: expected a posterior; got {header.kind}", code="wrong_kind", path=path)
    run.use(header)
    return header, Source(role, path, header.content_digest)


def open_posterior(path: Path) -> tuple[Any, Header]:
    """Open a posterior file on the CPU, verifying every byte, and return the posterior and its header.

    Raises:
        DataError: the file is damaged or its type is unknown to this version.
    """
    header = read_header(path)
    if header.kind == "samples":
        return open_samples(path)[0], header
    tensors, header = read_posterior(path)
    posterior_type = str(header.meta.get("type"))
    if posterior_type not in registry.names("posteriors"):
        raise DataError(f"{path}: unknown posterior type {posterior_type!r}", code="wrong_kind", path=path)
    try:
        return registry.load_class("posteriors", posterior_type).from_tensors(tensors, header.meta), header
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise _damage_error(path, error) from None


def require_draws(run: Run, header: Header, *, num_used: int | None = None, option: str | None = None) -> None:
    """Check that the draws of a posterior fit in memory before they are read or drawn.

    Args:
        num_used: draws to read or create; None for all stored draws.
        option: the command's option that sets this number.

    Raises:
        DeviceError: they do not fit.
    """
    metrics = header.meta.get("metrics", {})
    stored = int(metrics.get("chains", 0) * metrics.get("draws", 0)) if header.kind == "samples" else 0
    num_params = sum(math.prod(part["shape"]) for part in header.meta.get("param_layout", []))
    used = stored if num_used is None else num_used
    if num_params and (stored or used):
        memory.require_draws(num_params, run.device_name, num_used=used, num_stored=stored, option=option)


def open_samples(path: Path) -> tuple[Samples, SampleFile]:
    """Open a sample file and return its draws as a posterior, and its whole content.

    Raises:
        DataError: the file is damaged.
    """
    content = read_samples(path)
    try:
        return samples_of(content), content
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise _damage_error(path, error) from None


def _damage_error(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged: {' '.join(str(error).split())[:120]}", code="damaged", path=path)


def samples_of(content: SampleFile) -> Samples:
    """Return the draws (C, T, P) of a sample file as a posterior.

    Raises:
        ValueError: the file does not say what the draws are of.
    """
    if content.theta is not None:
        layout_of_network = ModuleLayout.from_meta({} if content.header is None else content.header.meta)
        return Samples(torch.from_numpy(content.theta), layout_of_network)
    assert content.head_weight is not None
    weight = torch.from_numpy(content.head_weight)
    num_outputs, num_features = content.head_weight.shape[2:]
    name = None if content.header is None else read_recorded_name(content.header.meta)
    layout = HeadLayout(num_outputs, num_features, content.head_bias is not None, name)
    bias = None if content.head_bias is None else torch.from_numpy(content.head_bias)
    return Samples(layout.join(weight, bias), layout)


def posterior_prior(path: Path, header: Header) -> Prior:
    """Return the prior recorded in a posterior's header.

    Raises:
        DataError: there is none.
    """
    prior = read_recorded_prior(header)
    if prior is None:
        raise DataError(
            f"{path} has no prior precision",
            hint="give \0prior_precision\0 NUMBER, or \0base\0 NAME of a fitted posterior",
            path=path,
        )
    return prior


def read_recorded_prior(header: Header) -> Prior | None:
    """Return the prior recorded in a posterior's header, with its mean from the file; None without one.

    Raises:
        DataError: the record is not a prior.
    """
    try:
        return Prior.from_meta(header.meta, mean=_read_prior_mean(header))
    except ValueError as error:
        raise _damage_error(header.path, error) from None


def _read_prior_mean(header: Header) -> Tensor | None:
    """Return the mean (P,) of the recorded prior; None if it has none."""
    if header.meta.get("prior_mean_scale") is None:
        return None
    if header.kind == "samples":
        mean = torch.from_numpy(read_constant(header.path, "prior_mean"))
    else:
        mean = read_tensor(header.path, "prior.mean")
    num_params = sum(math.prod(part["shape"]) for part in header.meta["param_layout"])
    if tuple(mean.shape) != (num_params,):
        raise ValueError(f"the prior mean has shape {tuple(mean.shape)}; expected ({num_params},)")
    return mean


def head_tensors(train: Split) -> dict[str, Tensor]:
    """Return the network's head, stored with every posterior; empty without one."""
    parts = {"head.weight": train.content.head_weight, "head.bias": train.content.head_bias}
    return {name: torch.from_numpy(part) for name, part in parts.items() if part is not None}


TRAIN, VAL, BOTH = FIT_ON = ("train", "val", "train+val")


def require_features(run: Run) -> None:
    """Check that the run has features, before bases are looked for.

    Raises:
        MissingInput: it has none; names the command that creates them.
    """
    if not run.folder.splits():
        load_split(run, TRAIN)


def load_fitted(run: Run, wanted: str) -> Split:
    """Load the labelled rows of train, of val, or of train and then val, as one split.

    Raises:
        MissingInput, DataError: a split is missing, unusable or unlabelled.
    """
    first, *others = (load_split(run, name).check_labeled() for name in wanted.split("+"))
    if not others:
        return first
    parts = [first.content, *(other.content for other in others)]
    features = np.concatenate([part.features for part in parts])
    labels = np.concatenate([part.labels for part in parts if part.labels is not None])
    content = replace(
        first.content, features=features, labels=labels, sample_id=np.arange(len(labels)), names=None, groups=None
    )
    return replace(first, content=content, also=tuple(other.source for other in others))


def keep_if_held_out(fitted: Split, split: Split | None) -> Split | None:
    """Return the split if none of its rows are fitted to, else None."""
    is_fitted = split is not None and split.source in fitted.sources
    return None if is_fitted else split


def unique_sources(*splits: Split | None) -> list[Source]:
    """Return the sources of splits without repetition."""
    return list(dict.fromkeys(source for split in splits if split is not None for source in split.sources))
