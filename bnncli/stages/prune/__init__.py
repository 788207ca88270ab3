"""prune: a latent binary network in, a network out of which most weights are gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import check_writable
from bnncli.artifacts.freshness import carries_our_mark, is_same_file
from bnncli.artifacts.provenance import Source
from bnncli.errors import OutputExists, UsageError
from bnncli.models.checkpoint_files import sniff
from bnncli.names import percent
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.prune import PruneOptions
from bnncli.posteriors import LATENT_BINARY
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split, posterior_source
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior
from bnncli.session.predictions import find_named
from bnncli.session.predictor import type_of
from bnncli.session.run import Result, Run
from bnncli.system.input_files import open_regular

COMMAND = Command(
    "Write the network without the weights that a latent binary network excludes.",
    "Keeps the weights with inclusion probability above 1/2 (median probability model), or the most probable "
    "ones, and sets them to their means. Reports the accuracy. Writes "
    "posteriors/<posterior>-sparse.safetensors, which predict uses as a single network.",
    (PruneOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli prune ckpt.pt",
        "bnncli prune mnist --rule density --density 0.01 --out sparse.safetensors",
        "bnncli prune mnist --dense pruned.safetensors",
    ),
    section="Fit",
    place=110,
)


def run(run: Run, options: PruneOptions) -> Result:
    """Prune and publish; the result's metrics have the density, and the accuracy before and after."""
    path = find_named(
        run, options.posterior, flag="--posterior", otherwise=run.suggest("fit-lbbnn", name=options.posterior)
    )
    header, source = posterior_source(run, path, "posterior")
    if type_of(header) != LATENT_BINARY:
        raise UsageError(
            f"--posterior: expected a latent-binary posterior; {path.stem} is of type {type_of(header)}",
            hint=run.suggest("fit-lbbnn"),
            code="wrong_type",
        )
    split = _split(run, options)
    sources = [source] if split is None else [source, split.source]
    params = {**options.params(), "posterior": path.stem, "split": split.content.name if split else None}
    request = posterior_request(
        run,
        f"{path.stem}-sparse",
        params=params,
        algo_rev=_revisions.PRUNE,
        sources=sources,
        checkpoint=header.provenance.get("checkpoint"),
        estimated_bytes=lambda: path.stat().st_size,
    )
    target = request.target
    dense = None if options.dense is None else _check_dense(run, Path(options.dense), target, sources)

    def fit() -> Fitted:
        from bnncli.stages.prune import work

        return work.fit(run, options, path, split)

    result = produce_posterior(run, request, fit, _report)
    if dense is not None:
        from bnncli.stages.prune.work import write_dense

        result.add(write_dense(run, target, dense))
    return result


def _split(run: Run, options: PruneOptions) -> Split | None:
    """The split to measure on: the one named, else test or val where they have labels, else none."""
    if options.split is not None:
        return load_split(run, options.split).check_labeled()
    for name in ("test", "val"):
        if run.folder.features(name).is_file():
            split = load_split(run, name)
            if split.content.labels is not None:
                return split
    return None


def _summary(metrics: dict[str, Any]) -> list[str]:
    if not metrics:
        return []
    kept, size = metrics["weights_kept"], metrics["bytes"]
    lines = [
        f"kept {kept} of {metrics['num_weights']} weights ({percent(metrics['density'], '.2f')}): "
        f"{_bytes(size['sparse'])}, {_bytes(size['dense'])} if dense"
    ]
    if metrics.get("repeats", 1) > 1:
        lines[0] += f"; from repeat {metrics['repeat']} of {metrics['repeats']}, the one with the highest bound"
    if metrics["split"] is not None:
        before, after = metrics["before"], metrics["after"]
        lines.append(
            f"split {metrics['split']}: accuracy {before['accuracy']:.4f} with the mean of all weights, "
            f"{after['accuracy']:.4f} after pruning; NLL {before['nll']:.4f}, then {after['nll']:.4f}"
        )
    return lines


def _bytes(count: int) -> str:
    """2.2 MB, 15.3 kB, 96 bytes."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _check_dense(run: Run, path: Path, target: Path, sources: Sequence[Source]) -> Path:
    """The path of the dense state dict, once it is known that it may be written: over nothing but a state dict."""
    if is_same_file(path, target) or path.absolute() == target.absolute():
        raise UsageError("--dense: this is the sparse file; give another name")
    for source in sources:
        if is_same_file(path, source.path):
            raise UsageError(f"--dense: {path} is an input of this command; give another name")
    if is_same_file(path, run.checkpoint_path):
        raise UsageError("--dense: this is the checkpoint; give another name")
    if path.exists():
        if not path.is_file():
            raise OutputExists(f"--dense: {path} is not a file", path=path)
        with open_regular(path) as stream:
            if sniff(stream) not in ("safetensors", "empty"):
                raise OutputExists(f"--dense: {path} is not a safetensors file", hint="give another name", path=path)
        if path.stat().st_size and carries_our_mark(path):
            raise OutputExists(f"--dense: {path} is an artifact of bnncli", hint="give another name", path=path)
        if not run.write.force:
            raise OutputExists(f"--dense: {path} exists", hint="add --force to replace it", path=path)
    check_writable(path.parent)
    return path


def _report(meta: Mapping[str, Any]) -> Report:
    return Report(meta["metrics"], _summary(meta["metrics"]))
