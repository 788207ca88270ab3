"""Which draws are joined, and whether they belong together: all that makes them draws of one posterior, by independent chains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import is_same_file
from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.provenance import Source
from bnncli.errors import DataError, UsageError
from bnncli.numerics.digests import json_sha256
from bnncli.options.merge import MergeOptions
from bnncli.parameters.module import LAST
from bnncli.session.inputs import Split, posterior_source, recorded_prior
from bnncli.session.out_of_fold import fit_on
from bnncli.session.predictions import find_named
from bnncli.session.revisions import is_another
from bnncli.session.run import Run

_METHODS = ("hmc", "merge")
_OF_THE_FIT = ("base", "features.val")  # inputs that the target does not depend on but by its prior
_ROLE = "draws."
_MAX_SHOWN = 120


@dataclass(frozen=True)
class MergedRun:
    """Draws that are to be joined.

    Attributes:
        source: as the merged posterior names them; no artifact of the run where the file is another folder's, whose own inputs may be gone.
    """

    path: Path
    header: Header
    source: Source

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The numbers of the runs."""
        return dict(self.header.meta["metrics"])

    @property
    def num_chains(self) -> int:
        """C."""
        return int(self.metrics["chains"])

    @property
    def num_draws(self) -> int:
        """T, of each chain."""
        return int(self.metrics["draws"])

    @property
    def num_params(self) -> int:
        """P."""
        return sum(math.prod(part["shape"]) for part in self.header.meta["param_layout"])

    @property
    def layers(self) -> str:
        """Which parameters the draws are of."""
        return str(self.header.meta.get("layers") or LAST)

    @property
    def seeds(self) -> list[int]:
        """Of the run, or of all that were joined before."""
        joined = self.header.meta.get("joined")
        if joined is None:
            return [int(self.header.provenance["seed"])]
        return [int(seed) for one in joined for seed in one["seeds"]]

    def to_json(self) -> dict[str, Any]:
        """What the merged posterior tells of it."""
        judged_by = self.metrics.get("judged_by")
        return {
            "name": self.path.stem,
            "content_digest": self.header.content_digest,
            "seeds": self.seeds,
            "chains": self.num_chains,
            "draws": self.num_draws,
            "max_rhat": self.metrics.get("max_rhat" if judged_by is None else f"{judged_by}_max_rhat"),
            "stopped_by": self.metrics.get("stopped_by"),
        }

    def facts(self) -> Iterator[tuple[str, object, str]]:
        """What must be the same of all parts: what it is, its value, and how that is shown."""
        meta = self.header.meta
        yield "checkpoint", self.header.weights_digest, _short(self.header.weights_digest)
        yield "layers", self.layers, self.layers
        inputs = {entry["role"]: entry["content_digest"] for entry in self.header.inputs}
        for role in sorted(inputs):
            if role not in _OF_THE_FIT and not role.startswith(_ROLE):
                yield role, inputs[role], _short(inputs[role])
        for name in ("likelihood", "sampler"):
            value = (self.metrics if name == "sampler" else meta).get(name)
            yield name, value, str(value)
        prior = recorded_prior(self.header)
        said = "none" if prior is None else " ".join(f"{name} {value}" for name, value in prior.to_meta().items())
        yield "prior", prior, said if len(said) < _MAX_SHOWN else f"{prior}, {_short(f'sha256:{json_sha256(said)}')}"
        yield "rows", fit_on(self.header), fit_on(self.header)
        for name in ("param_layout", "classes"):
            yield name.replace("_", " "), meta[name], _short(f"sha256:{json_sha256(meta[name])}")


def find_parts(run: Run, options: MergeOptions) -> list[MergedRun]:
    """The draws that were named, in the order given.

    Raises:
        UsageError: fewer than two, or one twice.
        MissingInput: one is not there.
        DataError: one is not of hmc, or stale.
    """
    if len(options.posterior) < 2:
        raise UsageError(f"--posterior: expected the draws of at least two hmc runs; got {len(options.posterior)}")
    parts: list[MergedRun] = []
    for number, name in enumerate(options.posterior, start=1):
        path = find_named(run, name, flag="--posterior", otherwise=run.suggest("hmc", name=name))
        if any(is_same_file(path, part.path) for part in parts):
            raise UsageError(f"--posterior: {name} is given twice; the same chains add nothing")
        header = read_header(path)
        if header.kind != "samples" or header.meta.get("method") not in _METHODS:
            found = header.meta.get("method", header.kind)
            raise DataError(f"{path}: expected draws of hmc; got {found}", code="wrong_kind", path=path)
        role = f"{_ROLE}{number}"
        if path.resolve().parent == run.folder.posterior(path.stem).parent.resolve():
            source = posterior_source(run, path, role)[1]
        else:
            source = Source(role, path, header.content_digest, is_artifact=False)
            if is_another(header):
                raise DataError(
                    f"{path} is stale: made by another revision of the algorithm", code="stale_input", path=path
                )
        parts.append(MergedRun(path, header, source))
    return parts


def require_together(run: Run, parts: list[MergedRun], train: Split) -> None:
    """Pass where the parts are independent chains of one posterior, which is that of the run.

    Raises:
        DataError: they are not; names what differs, and both values.
    """
    digest = None if train.checkpoint is None else train.checkpoint["weights_digest"]
    here = {"checkpoint": (digest, _short(digest)), "features.train": _digest(train.source.content_digest)}
    facts = {}
    for part in parts:
        with interpreting(part.path):
            facts[part.path] = {name: (value, shown) for name, value, shown in part.facts()}
            _ = part.to_json(), part.num_params
        _compare(part, facts[part.path], here, f"of the run {run.checkpoint_path}")
    first = facts[parts[0].path]
    for part in parts[1:]:
        known = facts[part.path]
        everything = dict.fromkeys([*known, *first], _NONE)
        _compare(part, everything | known, everything | first, f"in {parts[0].path}")
    for one, other in combinations(parts, 2):
        same = sorted(set(one.seeds) & set(other.seeds))
        if same or one.header.content_digest == other.header.content_digest:
            what = f"seed {same[0]}" if same else f"content {_short(one.header.content_digest)}"
            raise DataError(
                f"{other.path} and {one.path} have the same {what}: these are the same chains, which add nothing",
                hint="sample one of them again with another \0seed\0",
                code="same_chains",
                path=other.path,
            )


Shown = Mapping[str, tuple[object, str]]  # what is told of draws, by name: the value, and how it is shown
_NONE = (None, "none")


def _compare(part: MergedRun, known: Shown, wanted: Shown, whose: str) -> None:
    """Raise DataError where something of the part is another than what is wanted."""
    for name, (value, shown) in wanted.items():
        own, own_shown = known.get(name, _NONE)
        if own != value:
            raise DataError(
                f"{part.path} has {name} {own_shown}, but it is {shown} {whose}; merged chains must come from "
                "the same posterior",
                code="not_together",
                path=part.path,
            )


def _digest(digest: str) -> tuple[str, str]:
    return digest, _short(digest)


def _short(digest: str | None) -> str:
    """A digest as it is shown."""
    return "none" if digest is None else digest[:27]
