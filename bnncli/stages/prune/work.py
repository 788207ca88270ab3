"""The work of prune: which weights stay, what that costs, and the dense state dict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.posteriors import read_posterior
from bnncli.evaluation.example_statistics import examples_of
from bnncli.integrators.plug_in import PlugIn
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.options.prune import PruneOptions
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.sparse import Sparse
from bnncli.session.inputs import Split, open_posterior
from bnncli.session.posteriors import Fitted
from bnncli.session.run import Result, Run

if TYPE_CHECKING:
    from torch import Tensor

MUCH_LOST = 0.02  # of accuracy, above which there is a warning
NEARLY = 0.9  # of the weights that are in at any time: keeping as many would not help


def fit(run: Run, options: PruneOptions, path: Path, split: Split | None) -> Fitted:
    """The network that is left over, with what is told of it."""
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
    """Accuracy and mean NLL of one network; of several labels, of whole examples and of all decisions."""
    network: Any = sparse.to(run.device)
    labels = split.labels(run.device)
    probs = torch.cat(
        [
            PlugIn().predict(network, features, num_samples=None, generator=run.stream("prune")).probs
            for features in split.feature_blocks(run.device)
        ]
    )
    if labels.ndim == 2:
        found = examples_of(probs.cpu().numpy(), labels.cpu().numpy(), is_exclusive=False).of_labels
        assert found is not None
        assert found.num_wrong is not None
        assert found.log_loss is not None
        return {"accuracy": float((found.num_wrong == 0).mean()), "nll": float(found.log_loss.mean())}
    own = probs.gather(1, labels.unsqueeze(1)).double().clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "accuracy": float((probs.argmax(dim=1) == labels).double().mean()),
        "nll": float(-own.log().mean()),
    }


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
    shares = (
        f"on average {percent(expected, '.2g')} of the weights are included, but only {percent(density, '.2g')} were "
        "kept"
    )
    return f"{said}: {shares}; to keep as many as are included on average, run: {command}"


def write_dense(run: Run, source: Path, path: Path) -> Result:
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
