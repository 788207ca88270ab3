"""merge: join chains of hmc that were drawn apart into one posterior."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np

from bnncli import __version__
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import is_same_file
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.samples import SampleFile, write_samples
from bnncli.commands.hmc import HmcOptions, find_failure, format_summary, hmc_metrics, hmc_warnings, sample_file
from bnncli.errors import DataError, UsageError
from bnncli.inference import memory
from bnncli.inference.hmc import HmcRun
from bnncli.lazy import torch
from bnncli.numerics.digests import json_sha256
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.options.shared import trust_code_option
from bnncli.parameters.module import LAST
from bnncli.parameters.prior import Prior
from bnncli.session import revisions as _revisions
from bnncli.session.chains import Judge, head_judges, network_judge, parameter_judge
from bnncli.session.costs import Cost
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import (
    Split,
    keep_if_held_out,
    load_fitted,
    load_split,
    open_samples,
    posterior_prior,
    posterior_source,
    read_recorded_prior,
    require_features,
    unique_sources,
)
from bnncli.session.metrics import HmcMetrics
from bnncli.session.network_splits import NetworkReader, network_sources
from bnncli.session.out_of_fold import read_fitted_splits
from bnncli.session.predictions import find_named
from bnncli.session.produce import Request
from bnncli.session.revisions import is_another
from bnncli.session.run import Result, Run


@dataclass(frozen=True)
class MergeOptions(CheckedOptions):
    """Options of merge."""

    posterior: list[str] = option(
        [],
        "hmc posterior to merge, two or more, by name or file. A file may come from a copy of the run.",
        metavar="NAME|FILE",
        numeric=False,  # recorded by their names
    )
    max_rhat: float | None = option(
        None,
        "Exit 3 if the largest R-hat of the merged chains is above this value.",
        minimum=1.0,
        numeric=False,
    )
    trust_code: bool = trust_code_option()


COMMAND = Command(
    "Join the chains of separate hmc runs into one posterior.",
    "The runs must share checkpoint, train split, prior and sampler, and have different seeds. Recomputes R-hat, "
    "effective sample sizes and E-BFMI over all chains. Writes posteriors/merged.nc.",
    (MergeOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli merge ckpt.pt --posterior hmc-1 --posterior hmc-2",
        "bnncli merge ckpt.pt --posterior hmc --posterior elsewhere/ckpt.pt.bnn/posteriors/hmc.nc --max-rhat 1.01",
    ),
    section="Research",
    place=50,
)


def execute(run: Run, options: MergeOptions) -> Result:
    """Merge and publish. The result's metrics are those of hmc, over all chains."""
    require_features(run)
    parts = find_parts(run, options)
    train = load_fitted(run, read_fitted_splits(parts[0].header))
    held_out = keep_if_held_out(train, load_split(run, "val") if "val" in run.folder.splits() else None)
    require_together(run, parts, train)
    run.require_device()
    layers, num_params = parts[0].layers, parts[0].num_params
    num_draws = min(part.num_draws for part in parts) * sum(part.num_chains for part in parts)
    stored = sum(part.num_draws * part.num_chains for part in parts)
    used = [split for split in (train, held_out) if split is not None]
    request = posterior_request(
        run,
        "merged",
        kind="samples",
        params={"posteriors": [part.path.stem for part in parts], "seed": run.compute.seed},
        algo_rev=_revisions.MERGE,
        sources=[
            *unique_sources(*used),
            *([] if layers == LAST else network_sources(used)),
            *(part.source for part in parts),
        ],
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: memory.draw_storage_bytes(num_params, num_draws) // 2,
        require=lambda: memory.require_draws(num_params, run.device_name, num_used=num_draws, num_stored=stored),
    )

    def fit() -> FitOutput:
        return merge_chains(run, options, request, parts, train=train, held_out=held_out)

    return produce_posterior(run, request, fit, lambda meta: _report(meta, options))


_METHODS = ("hmc", "merge")
_ROLE = "draws."
_OF_THE_FIT = ("base", "features.val")  # inputs that the target does not depend on but by its prior
_MAX_SHOWN = 120


@dataclass(frozen=True)
class MergedRun:
    """Draws to merge.

    Attributes:
        source: source that the merged posterior records; not an artifact if the file is in another run folder, whose inputs may be gone.
    """

    path: Path
    header: Header
    source: Source

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Return the recorded metrics."""
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
        """Return the layers that the draws are over."""
        return str(self.header.meta.get("layers") or LAST)

    @property
    def seeds(self) -> list[int]:
        """Return the seed of the run, or the seeds of all runs merged before."""
        joined = self.header.meta.get("joined")
        if joined is None:
            return [int(self.header.provenance["seed"])]
        return [int(seed) for one in joined for seed in one["seeds"]]

    def to_json(self) -> dict[str, Any]:
        """Return what the merged posterior records of this part."""
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
        """Return the facts that all parts must share: name to value and text."""
        meta = self.header.meta
        yield "checkpoint", self.header.weights_digest, _shorten_digest(self.header.weights_digest)
        yield "layers", self.layers, self.layers
        inputs = {entry["role"]: entry["content_digest"] for entry in self.header.inputs}
        for role in sorted(inputs):
            if role not in _OF_THE_FIT and not role.startswith(_ROLE):
                yield role, inputs[role], _shorten_digest(inputs[role])
        for name in ("likelihood", "sampler"):
            value = (self.metrics if name == "sampler" else meta).get(name)
            yield name, value, str(value)
        prior = read_recorded_prior(self.header)
        said = "none" if prior is None else " ".join(f"{name} {value}" for name, value in prior.to_meta().items())
        yield (
            "prior",
            prior,
            said if len(said) < _MAX_SHOWN else f"{prior}, {_shorten_digest(f'sha256:{json_sha256(said)}')}",
        )
        yield "rows", read_fitted_splits(self.header), read_fitted_splits(self.header)
        for name in ("param_layout", "classes"):
            yield name.replace("_", " "), meta[name], _shorten_digest(f"sha256:{json_sha256(meta[name])}")


def find_parts(run: Run, options: MergeOptions) -> list[MergedRun]:
    """Return the named draws, in the order given.

    Raises:
        UsageError: fewer than two draws are named, or one twice.
        MissingInput: one does not exist.
        DataError: one is not from hmc, or is stale.
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


_NONE = (None, "none")


def require_together(run: Run, parts: list[MergedRun], train: Split) -> None:
    """Check that the parts are independent chains of one posterior, the run's.

    Raises:
        DataError: they are not. The message names what differs and both values.
    """
    digest = None if train.checkpoint is None else train.checkpoint["weights_digest"]
    here = {"checkpoint": (digest, _shorten_digest(digest)), "features.train": _digest(train.source.content_digest)}
    facts = {}
    for part in parts:
        with convert_lookup_errors(part.path):
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
            what = f"seed {same[0]}" if same else f"content {_shorten_digest(one.header.content_digest)}"
            raise DataError(
                f"{other.path} and {one.path} have the same {what}: these are the same chains, which add nothing",
                hint="sample one of them again with another \0seed\0",
                code="same_chains",
                path=other.path,
            )


def _digest(digest: str) -> tuple[str, str]:
    return digest, _shorten_digest(digest)


def _shorten_digest(digest: str | None) -> str:
    """Shorten a digest for messages."""
    return "none" if digest is None else digest[:27]


Shown = Mapping[str, tuple[object, str]]  # properties of draws, by name: the value and its text


def _compare(part: MergedRun, known: Shown, wanted: Shown, whose: str) -> None:
    """Raise DataError where a fact about the part differs from the expected one."""
    for name, (value, shown) in wanted.items():
        own, own_shown = known.get(name, _NONE)
        if own != value:
            raise DataError(
                f"{part.path} has {name} {own_shown}, but it is {shown} {whose}; merged chains must come from "
                "the same posterior",
                code="not_together",
                path=part.path,
            )


_OF_ONE_RUN = ("metrics", "method", "whitening", "joined")


@dataclass(frozen=True)
class Joining:
    """One request for merged chains.

    Args:
        train: training split, with the layout of theta.
        judges: split name (heldout, train) to the judge of how chains agree on log probabilities of its labels.
        judged_by: split whose predictions decide whether the chains converged; None to decide by the parameters.
    """

    run: Run
    request: Request
    parts: list[MergedRun]
    train: Split
    prior: Prior
    judges: Mapping[str, Judge]
    judged_by: str | None = None

    def fit(self) -> FitOutput:
        """Judge the draws as hmc does."""
        drawn, step_sizes = _join_chains(self.parts)
        metrics = hmc_metrics(
            drawn,
            parameter_judge(self.run)(drawn.draws),
            predictions={name: judge(drawn.draws) for name, judge in self.judges.items()},
            judged_by=self.judged_by,
            options=HmcOptions(sampler=self.parts[0].metrics["sampler"], chains=drawn.draws.shape[0]),
            prior=self.prior,
        )
        metrics["dynamics"] = self._common("dynamics")
        if (gradients := self._common("gradients")) is not None:
            metrics["gradients"] = gradients
        costs = [Cost.recorded(part.metrics) for part in self.parts]
        known = [cost.passes for cost in costs if cost is not None]
        if len(known) == len(costs):
            metrics |= Cost.of_fit(sum(known), is_last_layer=self.train.is_last_layer).to_metrics()
        for text in hmc_warnings(cast(HmcMetrics, metrics)):
            self.run.console.warn(f"{text} (in hmc, for each run)")
        first = self.parts[0].header.meta
        meta = {name: value for name, value in first.items() if name not in _OF_ONE_RUN}
        meta |= {"method": "merge", "joined": [part.to_json() for part in self.parts]}
        content = sample_file(drawn, self.train, self.prior)
        content = replace(content, stats=content.stats | {"step_size": step_sizes})
        return FitOutput({}, meta, metrics, self.train, write=partial(self._write, content))

    def _common(self, name: str) -> Any:
        """Return the value that all runs share; None where they differ or have none."""
        values = [part.metrics.get(name) for part in self.parts]
        return values[0] if all(value == values[0] for value in values) else None

    def _write(self, content: SampleFile, meta: dict[str, Any], provenance: dict[str, Any], may_replace: bool) -> str:
        is_nuts, train = self.parts[0].metrics["sampler"] == "nuts", self.train
        return write_samples(
            self.request.target,
            content,
            outputs=train.layout.likelihood.output_names(train.content.classes),
            created_at=provenance["created_at"],
            name=self.run.checkpoint_path.stem,
            sampler_library=("pyro", version("pyro-ppl")) if is_nuts else ("bnncli", __version__),
            meta=meta,
            provenance=provenance,
            may_replace=may_replace,
        )


def merge_chains(
    run: Run, options: MergeOptions, request: Request, parts: list[MergedRun], *, train: Split, held_out: Split | None
) -> FitOutput:
    """Merge the draws, judge them and measure them on val."""
    layers, prior = parts[0].layers, posterior_prior(parts[0].path, parts[0].header)
    if layers == LAST:
        joining = Joining(run, request, parts, train, prior, head_judges(run, train, held_out))
        return joining.fit()
    reader = NetworkReader(run, options.trust_code)
    with reader.recorded.visible():
        whole = reader.split(train, layers)
        judged_by, judged = "train", whole
        if held_out is not None and held_out.content.labels is not None:
            judged_by, judged = "heldout", reader.split(held_out, layers)
        judges = {judged_by: network_judge(run, whole.target(prior, run.device), judged)}
        return Joining(run, request, parts, whole, prior, judges, judged_by).fit()


def _join_chains(parts: list[MergedRun]) -> tuple[HmcRun, np.ndarray]:
    """Concatenate the chains, cut to the shortest, and return their step sizes (C, T) too."""
    found = [open_samples(part.path) for part in parts]
    num_draws = min(posterior.draws.shape[1] for posterior, _ in found)
    draws = torch.cat([posterior.draws[:, :num_draws] for posterior, _ in found])
    names = set.intersection(*(set(content.stats) for _, content in found))
    stats = {name: np.concatenate([content.stats[name][:, :num_draws] for _, content in found]) for name in names}
    drawn = HmcRun(
        draws,
        torch.from_numpy(stats["lp"]),
        torch.from_numpy(stats["energy"]) if "energy" in stats else None,
        torch.from_numpy(stats["acceptance_rate"]),
        torch.from_numpy(stats["diverging"].astype(bool)),
        float(stats["step_size"].astype(np.float64).mean()),
        torch.from_numpy(stats["n_steps"]),
    )
    return drawn, stats["step_size"]


def _report(meta: Mapping[str, Any], options: MergeOptions) -> Report:
    metrics, joined = meta["metrics"], meta["joined"]
    shown = ", ".join(
        f"{one['name']} (seed {'+'.join(map(str, one['seeds']))}, {one['chains']} x {one['draws']}"
        + (")" if one["max_rhat"] is None else f", R-hat {one['max_rhat']:.3f})")
        for one in joined
    )
    lines = [f"joined: {shown}"]
    if longer := [one for one in joined if one["draws"] > metrics["draws"]]:
        names = ", ".join(one["name"] for one in longer)
        lines.append(f"cut to the shortest run, {metrics['draws']} draws per chain: {names}")
    if stopped := [f"{one['name']} ({one['stopped_by']})" for one in joined if one["stopped_by"] is not None]:
        lines.append(f"stopped early by hmc --until: {', '.join(stopped)}; this makes the joint numbers optimistic too")
    return Report(
        metrics, [*lines, *format_summary(metrics)], find_failure(metrics, HmcOptions(max_rhat=options.max_rhat))
    )
