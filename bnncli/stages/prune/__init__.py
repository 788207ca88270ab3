"""prune: a latent binary network in, a network out of which most weights are gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnncli.checkpoints.sniff import sniff
from bnncli.errors import OutputExists, UsageError
from bnncli.integrators.plug_in import PlugIn
from bnncli.machine.inputs import open_regular
from bnncli.options import InputOptions, NameOptions, PruneOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.sparse import Sparse
from bnncli.run import revisions as _revisions
from bnncli.run.inputs import Split, load_split, open_posterior, posterior_source
from bnncli.run.predict_plan import kind_of
from bnncli.run.produce_posterior import Fitted, Report, posterior_request, produce_posterior
from bnncli.run.session import Result, Run
from bnncli.storage.atomic import check_writable, publish_bytes
from bnncli.storage.freshness import carries_our_mark, is_same_file
from bnncli.storage.posteriors import read_posterior
from bnncli.storage.provenance import Source

COMMAND = Command(
    "Write the network that a latent binary network's inclusion probabilities leave over.",
    "Keeps the weights that are in with probability above 1/2 (the median probability model), or the most probable ones "
    "down to a target density, at their mean. Says what accuracy is kept. Writes posteriors/<posterior>-sparse.safetensors, "
    "compressed by rows, which predict takes as a single network; with --dense also an ordinary state dict.",
    (PruneOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli prune ckpt.pt",
        "bnncli prune mnist --rule density --density 0.01 --out sparse.safetensors",
        "bnncli prune mnist --dense pruned.safetensors",
    ),
    place=70,
)

MUCH_LOST = 0.02  # of accuracy, above which there is a warning
NEARLY = 0.9  # of the weights that are in at any time: keeping as many would not help


def run(run: Run, options: PruneOptions) -> Result:
    """Prune and publish; the result's metrics have the density, and the accuracy before and after."""
    path = run.folder.find_posterior(options.posterior, flag="--posterior", maker=run.suggest("fit-lbbnn"))
    header, source = posterior_source(run, path, "posterior")
    if kind_of(header) != LatentBinary.type:
        raise UsageError(
            f"--posterior: expected a latent-binary posterior; {path.stem} is of type {kind_of(header)}",
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
        estimated_bytes=path.stat().st_size,
    )
    target = request.target
    dense = None if options.dense is None else _check_dense(run, Path(options.dense), target, sources)
    result = produce_posterior(run, request, lambda: _fit(run, options, path, split), _report)
    if dense is not None:
        result.add(_write_dense(run, target, dense))
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


def _fit(run: Run, options: PruneOptions, path: Path, split: Split | None) -> Fitted:
    stored, header = read_posterior(path)
    posterior = LatentBinary.from_tensors(stored, header.meta)
    is_in = chosen_weights(posterior, options.density)
    sparse = Sparse(posterior.with_weights(is_in), posterior.model.layout)
    tensors, meta = sparse.to_tensors()
    metrics = _metrics(run, sparse, posterior, split, is_in)
    warning = _lost_accuracy(run, metrics, path)
    if warning is not None:
        run.console.warn(warning)
    metrics["bytes"] = {
        "sparse": sum(tensor.nbytes for tensor in tensors.values()),
        "dense": 4 * posterior.model.layout.num_params,
    }
    tensors |= {name: part for name, part in stored.items() if name.startswith("head.")}
    meta |= {"method": "prune", **{name: header.meta[name] for name in ("param_layout", "num_examples", "classes")}}
    return Fitted(tensors, meta, metrics)


def chosen_weights(posterior: LatentBinary, density: float | None) -> Tensor:
    """Which weights stay, (W,): those in with probability above 1/2, or the most probable share; ties by their place."""
    logit = posterior.model.factors.logit[posterior.best]
    if density is None:
        return logit > 0
    is_in = torch.zeros_like(logit, dtype=torch.bool)
    is_in[logit.sort(descending=True, stable=True).indices[: round(density * len(logit))]] = True
    return is_in


def _metrics(run: Run, sparse: Sparse, posterior: LatentBinary, split: Split | None, is_in: Tensor) -> dict[str, Any]:
    """What stays, and the accuracy and NLL before (at the mean of all weights) and after."""
    probabilities = posterior.inclusion[is_in]
    metrics: dict[str, Any] = {
        "weights_kept": int(is_in.sum()),
        "num_weights": len(is_in),
        "density": float(is_in.double().mean()),
        "density_by_layer": [float(part.double().mean()) for part in sparse.network.weights(is_in)],
        "expected_density": float(posterior.model.factors.inclusion[posterior.best].double().mean()),
        "repeat": posterior.best + 1,
        "repeats": posterior.model.num_repeats,
        "lowest_inclusion": float(probabilities.min()) if len(probabilities) else None,
        "split": split.content.name if split is not None else None,
    }
    if split is not None:
        split.check_fits(sparse.layout)
        for name, network in (("before", posterior.mean_theta), ("after", sparse.theta)):
            metrics[name] = _scores(run, Sparse(network, sparse.network), split)
    return metrics


def _scores(run: Run, sparse: Sparse, split: Split) -> dict[str, float]:
    """Accuracy and mean NLL of one network."""
    network: Any = sparse.to(run.device)
    labels = split.labels(run.device)
    probs = torch.cat(
        [
            PlugIn().predict(network, features, num_samples=None, generator=run.stream("prune")).probs
            for features in split.feature_blocks(run.device)
        ]
    )
    own = probs.gather(1, labels.unsqueeze(1)).double().clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "accuracy": float((probs.argmax(dim=1) == labels).double().mean()),
        "nll": float(-own.log().mean()),
    }


def _summary(metrics: dict[str, Any]) -> list[str]:
    if not metrics:
        return []
    kept, size = metrics["weights_kept"], metrics["bytes"]
    lines = [
        f"{kept} of {metrics['num_weights']} weights stay ({100 * metrics['density']:.2f} %): {_bytes(size['sparse'])}, dense "
        f"{_bytes(size['dense'])}"
    ]
    if metrics.get("repeats", 1) > 1:
        lines[0] += f"; of repeat {metrics['repeat']} of {metrics['repeats']}, the one with the highest bound"
    if metrics["split"] is not None:
        before, after = metrics["before"], metrics["after"]
        lines.append(
            f"split {metrics['split']}: accuracy {before['accuracy']:.4f} with the mean of all weights, {after['accuracy']:.4f} "
            f"now; NLL {before['nll']:.4f}, {after['nll']:.4f}"
        )
    return lines


def _bytes(count: int) -> str:
    """2.2 MB, 15.3 kB, 96 bytes."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _lost_accuracy(run: Run, metrics: dict[str, Any], path: Path) -> str | None:
    """What to say of a network that lost accuracy, and which density would keep more; None of one that did not."""
    if metrics["split"] is None:
        return None
    before, after = metrics["before"]["accuracy"], metrics["after"]["accuracy"]
    if before - after < MUCH_LOST:
        return None
    said = f"accuracy on {metrics['split']} fell from {before:.4f} to {after:.4f}"
    density, expected = metrics["density"], metrics["expected_density"]
    if density >= NEARLY * expected:
        return f"{said}: keep more weights, with --rule density and a --density above {density:.2g}"
    posterior, name = None if path.stem == "lbbnn" else path.stem, f"{path.stem}-dense"
    command = run.suggest("prune", posterior=posterior, rule="density", density=f"{expected:.2g}", name=name)
    shares = f"{100 * expected:.2g} % of the weights are in at any time and {100 * density:.2g} % were kept"
    return f"{said}: {shares}; to keep as many: {command}"


def _check_dense(run: Run, path: Path, target: Path, sources: Sequence[Source]) -> Path:
    """The path of the dense state dict, once it is known that it may be written: over nothing but a state dict."""
    if is_same_file(path, target) or path.absolute() == target.absolute():
        raise UsageError("--dense: that is the sparse file; give another name")
    for source in sources:
        if is_same_file(path, source.path):
            raise UsageError(f"--dense: {path} is an input of this command; give another name")
    if is_same_file(path, run.checkpoint_path):
        raise UsageError("--dense: that is the checkpoint; give another name")
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


def _write_dense(run: Run, source: Path, path: Path) -> Result:
    """The dense state dict of a sparse file."""
    from safetensors.torch import save

    from bnncli.numerics.digests import tensor_digest

    output: dict[str, Any] = {"role": "state_dict", "path": str(path)}
    if run.write.dry_run:
        return Result("planned", [output], lines=[f"write {path}"])
    posterior, _ = open_posterior(source)
    state = posterior.state_dict()
    publish_bytes(path, save(state), may_replace=run.write.force)
    return Result("computed", [output | {"content_digest": tensor_digest(state)}])


def _report(meta: Mapping[str, Any]) -> Report:
    return Report(meta["metrics"], _summary(meta["metrics"]))
