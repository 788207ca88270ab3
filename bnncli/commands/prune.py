"""prune: turn a latent binary network into one with most weights removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import check_writable, publish_bytes
from bnncli.artifacts.freshness import carries_our_mark, is_same_file
from bnncli.artifacts.posteriors import read_posterior
from bnncli.artifacts.provenance import Source
from bnncli.errors import OutputExists, UsageError
from bnncli.evaluation.statistics import compute_example_statistics
from bnncli.integrators.plug_in import PlugIn
from bnncli.lazy import torch
from bnncli.models.checkpoint_files import sniff
from bnncli.names import percent
from bnncli.numerics.digests import tensor_digest
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.posteriors import LATENT_BINARY
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.sparse import Sparse
from bnncli.session import revisions as _revisions
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import Split, load_split, open_posterior, posterior_source
from bnncli.session.predictions import find_named
from bnncli.session.predictor import type_of
from bnncli.session.run import Result, Run
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PruneOptions(CheckedOptions):
    """Options of prune."""

    posterior: str = option("lbbnn", "Latent binary network to prune, by name or file.", metavar="NAME|FILE")
    rule: str = option(
        "median",
        "Weights to keep: those with inclusion probability above 1/2 (median), or the most probable ones up to "
        "\0density\0.",
        choices=("median", "density"),
    )
    density: float | None = option(
        None, "Share of the weights to keep, with \0rule\0 density.", minimum=0.0, maximum=1.0
    )
    split: str | None = option(None, "Labelled split to measure accuracy on. Default: test, else val.", metavar="SPLIT")
    dense: str | None = option(
        None,
        "Also write a dense state dict for torch.nn.Sequential (0.weight, 0.bias, 2.weight, ...) to this "
        "safetensors file.",
        metavar="FILE",
        writes=True,
        numeric=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rule == "density") != (self.density is not None):
            raise UsageError("\0rule\0 density and \0density\0 go together: give both or neither")


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


def execute(run: Run, options: PruneOptions) -> Result:
    """Prune and publish. The result's metrics have the density, and the accuracy before and after."""
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

    def fit() -> FitOutput:
        return prune_network(run, options, path, split)

    result = produce_posterior(run, request, fit, _report)
    if dense is not None:
        result.add(write_dense(run, target, dense))
    return result


def _split(run: Run, options: PruneOptions) -> Split | None:
    """Return the split to measure on: the named one, else labelled test or val, else None."""
    if options.split is not None:
        return load_split(run, options.split).check_labeled()
    for name in ("test", "val"):
        if run.folder.features(name).is_file():
            split = load_split(run, name)
            if split.content.labels is not None:
                return split
    return None


def _check_dense(run: Run, path: Path, target: Path, sources: Sequence[Source]) -> Path:
    """Return the path of the dense state dict, after checking that it replaces nothing but a state dict."""
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


def prune_network(run: Run, options: PruneOptions, path: Path, split: Split | None) -> FitOutput:
    """Prune the network and return it with metrics."""
    stored, header = read_posterior(path)
    posterior = LatentBinary.from_tensors(stored, header.meta)
    is_in = choose_weights(posterior, options.density)
    sparse = Sparse(posterior.with_weights(is_in), posterior.model.layout)
    tensors, meta = sparse.to_tensors()
    metrics = _metrics(run, sparse, posterior, split, is_in)
    warning = _warn_of_lost_accuracy(run, metrics, path)
    if warning is not None:
        run.console.warn(warning)
    metrics["bytes"] = {
        "sparse": sum(tensor.nbytes for tensor in tensors.values()),
        "dense": 4 * posterior.model.layout.num_params,
    }
    tensors |= {name: part for name, part in stored.items() if name.startswith("head.")}
    meta |= {"method": "prune", **{name: header.meta[name] for name in ("param_layout", "num_examples", "classes")}}
    return FitOutput(tensors, meta, metrics)


def choose_weights(posterior: LatentBinary, density: float | None) -> Tensor:
    """Return a mask (W,) of the weights to keep: inclusion probability above 1/2, or the most probable fraction. Ties go to the first."""
    logit = posterior.model.factors.logit[posterior.best]
    if density is None:
        return logit > 0
    is_in = torch.zeros_like(logit, dtype=torch.bool)
    is_in[logit.sort(descending=True, stable=True).indices[: round(density * len(logit))]] = True
    return is_in


def _metrics(run: Run, sparse: Sparse, posterior: LatentBinary, split: Split | None, is_in: Tensor) -> dict[str, Any]:
    """Return the density, and the accuracy and NLL before (at the mean of all weights) and after."""
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
    """Return accuracy and mean NLL of one network; with several labels, of whole examples and of all decisions."""
    network: Any = sparse.to(run.device)
    labels = split.labels(run.device)
    probs = torch.cat(
        [
            PlugIn().predict(network, features, num_samples=None, generator=run.stream("prune")).probs
            for features in split.feature_blocks(run.device)
        ]
    )
    if labels.ndim == 2:
        found = compute_example_statistics(probs.cpu().numpy(), labels.cpu().numpy(), is_exclusive=False).of_labels
        assert found is not None
        assert found.num_wrong is not None
        assert found.log_loss is not None
        return {"accuracy": float((found.num_wrong == 0).mean()), "nll": float(found.log_loss.mean())}
    own = probs.gather(1, labels.unsqueeze(1)).double().clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "accuracy": float((probs.argmax(dim=1) == labels).double().mean()),
        "nll": float(-own.log().mean()),
    }


MUCH_LOST = 0.02  # loss of accuracy that causes a warning
NEARLY = 0.9  # of the weights that are in at any time: keeping as many would not help


def _warn_of_lost_accuracy(run: Run, metrics: dict[str, Any], path: Path) -> str | None:
    """Return a warning where pruning lost accuracy, with a density that keeps more; else None."""
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


def _report(meta: Mapping[str, Any]) -> Report:
    return Report(meta["metrics"], _summary(meta["metrics"]))


def _summary(metrics: dict[str, Any]) -> list[str]:
    if not metrics:
        return []
    kept, size = metrics["weights_kept"], metrics["bytes"]
    lines = [
        f"kept {kept} of {metrics['num_weights']} weights ({percent(metrics['density'], '.2f')}): "
        f"{_format_bytes(size['sparse'])}, {_format_bytes(size['dense'])} if dense"
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


def _format_bytes(count: int) -> str:
    """Format a size, such as 2.2 MB, 15.3 kB, 96 bytes."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def write_dense(run: Run, source: Path, path: Path) -> Result:
    """Write the dense state dict of a sparse file."""
    from safetensors.torch import save

    output: dict[str, Any] = {"role": "state_dict", "path": str(path)}
    if run.write.dry_run:
        return Result("planned", [output], lines=[f"write {path}"])
    posterior, _ = open_posterior(source)
    state = posterior.state_dict()
    publish_bytes(path, save(state), may_replace=run.write.force)
    return Result("computed", [output | {"content_digest": tensor_digest(state)}])
