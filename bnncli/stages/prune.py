"""prune: a latent binary network in, a network out of which most weights are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnncli.errors import OutputExists, UsageError
from bnncli.inputs import open_regular
from bnncli.integrators.plug_in import PlugIn
from bnncli.options import PruneOptions
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.sparse import Sparse
from bnncli.stages._inputs import Split, load_split, open_posterior, posterior_source
from bnncli.stages._predict_plan import kind_of
from bnncli.stages._produce import Computed, Request, produce
from bnncli.stages._run import Result, Run
from bnncli.storage.atomic import check_writable, publish_bytes
from bnncli.storage.freshness import is_same_file
from bnncli.storage.headers import Header
from bnncli.storage.posteriors import read_posterior, write_posterior
from bnncli.storage.sniff import sniff

ALGO_REV = 1


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
    target = Path(run.naming.out) if run.naming.out else run.folder.posterior(run.naming.name or f"{path.stem}-sparse")
    run.folder.check_name_is_free(target)
    dense = None if options.dense is None else _check_dense(run, Path(options.dense), target)
    request = Request(
        target,
        "posterior",
        target.stem,
        params,
        ALGO_REV,
        sources,
        header.provenance.get("checkpoint"),
        path.stat().st_size,
    )
    result = produce(run, request, lambda: _compute(run, options, path, split, target), when_fresh=_when_fresh)
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


def _compute(run: Run, options: PruneOptions, path: Path, split: Split | None, target: Path) -> Computed:
    stored, header = read_posterior(path)
    posterior = LatentBinary.from_tensors(stored, header.meta)
    is_in = chosen_weights(posterior, options.density)
    sparse = Sparse(posterior.with_weights(is_in), posterior.model.layout)
    tensors, meta = sparse.to_tensors()
    metrics = _metrics(run, sparse, posterior, split, is_in)
    metrics["bytes"] = {
        "sparse": sum(tensor.nbytes for tensor in tensors.values()),
        "dense": 4 * posterior.model.layout.num_params,
    }
    tensors |= {name: part for name, part in stored.items() if name.startswith("head.")}
    meta |= {
        "method": "prune",
        "param_layout": header.meta["param_layout"],
        "num_examples": header.meta["num_examples"],
        "metrics": metrics,
        "classes": header.meta["classes"],
    }

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_posterior(target, tensors, meta=meta, provenance=provenance, may_replace=may_replace)

    return Computed(publish, metrics, _summary(metrics))


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
        f"{kept} of {metrics['num_weights']} weights stay ({100 * metrics['density']:.2f} %): "
        f"{size['sparse'] / 1e3:.1f} kB, dense {size['dense'] / 1e3:.1f} kB"
    ]
    if metrics["split"] is not None:
        before, after = metrics["before"], metrics["after"]
        lines.append(
            f"split {metrics['split']}: accuracy {before['accuracy']:.4f} with the mean of all weights, {after['accuracy']:.4f} "
            f"now; NLL {before['nll']:.4f}, {after['nll']:.4f}"
        )
    return lines


def _check_dense(run: Run, path: Path, target: Path) -> Path:
    """The path of the dense state dict, once it is known that it may be written."""
    if is_same_file(path, target) or path.absolute() == target.absolute():
        raise UsageError("--dense: that is the sparse file; give another name")
    if is_same_file(path, run.checkpoint_path):
        raise UsageError("--dense: that is the checkpoint; give another name")
    if path.exists():
        if not path.is_file():
            raise OutputExists(f"--dense: {path} is not a file", path=path)
        with open_regular(path) as stream:
            if sniff(stream) not in ("safetensors", "empty"):
                raise OutputExists(f"--dense: {path} is not a safetensors file", hint="give another name", path=path)
        if not run.write.force:
            raise OutputExists(f"--dense: {path} exists", hint="add --force to replace it", path=path)
    check_writable(path.parent)
    return path


def _write_dense(run: Run, source: Path, path: Path) -> Result:
    """The dense state dict of a sparse file."""
    from safetensors.torch import save

    from bnncli.digests import tensor_digest

    output: dict[str, Any] = {"role": "state_dict", "path": str(path)}
    if run.write.dry_run:
        return Result("planned", [output], lines=[f"write {path}"])
    posterior, _ = open_posterior(source)
    state = posterior.state_dict()
    publish_bytes(path, save(state), may_replace=run.write.force)
    return Result("computed", [output | {"content_digest": tensor_digest(state)}])


def _when_fresh(header: Header) -> Computed:
    metrics = header.meta.get("metrics", {})
    return Computed(lambda provenance, may_replace: header.content_digest, metrics, _summary(metrics))
