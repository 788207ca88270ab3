"""predict: posteriors and features in, class probabilities out, one file for each posterior and split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.integrators import can_use, join, load_integrator, usable
from bnncli.integrators.mc import probs_of_draws
from bnncli.options import PredictOptions
from bnncli.stages._inputs import Split, load_split, open_posterior, posterior_source
from bnncli.stages._produce import Computed, Request, produce
from bnncli.stages._run import Result, Run
from bnncli.storage.headers import Header
from bnncli.storage.predictions import PredictionFile, write_predictions
from bnncli.storage.provenance import Source

ALGO_REV = 1
DEFAULT_SAMPLES = 20
PLUG_IN_METHODS = ("map", "temperature")


def run(run: Run, options: PredictOptions) -> Result:
    """Predict what was asked for; a posterior that is stale is skipped with a warning unless it was named."""
    splits = [load_split(run, name) for name in _split_names(run, options)]
    total = Result()
    for path, is_named in _posterior_paths(run, options):
        try:
            header, source = posterior_source(run, path, "posterior")
        except DataError as error:
            if is_named:
                raise
            run.console.warn(f"skipping {path.stem}: {error.message}" + (f"; run: {error.hint}" if error.hint else ""))
            continue
        total.add(_predict(run, options, path, header, source, splits))
    if not total.outputs:
        raise DataError(
            "no posterior of the run can be used: each is stale, or does not fit the integrator",
            code="stale_input",
            hint=run.suggest("status"),
        )
    counts = f"{len(total.outputs)} files, {len(splits)} splits"
    total.summary = [f"{counts}: {total.action.replace('_', ' ')}"] if not run.write.dry_run else []
    return total


def _split_names(run: Run, options: PredictOptions) -> list[str]:
    names = list(dict.fromkeys(options.split)) or [name for name in run.folder.splits() if name != "train"]
    if not names:
        checkpoint = run.checkpoint_path
        raise MissingInput(
            f"{checkpoint} has no splits to predict but train"
            if run.folder.splits()
            else f"{checkpoint} has no features",
            hint=run.suggest("extract-features", "--model", "MODEL", "--data", "test=SPEC"),
            path=run.folder.root / "features",
        )
    if run.naming.out is not None and (len(names) != 1 or len(options.posterior) != 1):
        raise UsageError("--out FILE holds one prediction: name one --posterior and one --split")
    if run.naming.name is not None and len(options.posterior) != 1:
        raise UsageError("--name names the predictions of one posterior: give one --posterior")
    return names


def _posterior_paths(run: Run, options: PredictOptions) -> list[tuple[Path, bool]]:
    if options.posterior:
        maker = run.suggest("status")
        return [
            (run.folder.find_posterior(name, flag="--posterior", maker=maker), True)
            for name in dict.fromkeys(options.posterior)
        ]
    found = run.folder.posteriors()
    if not found:
        raise MissingInput(
            f"{run.checkpoint_path} has no posteriors",
            hint=run.suggest("fit-laplace"),
            path=run.folder.root / "posteriors",
        )
    return [(path, False) for path in found]


def _predict(
    run: Run, options: PredictOptions, path: Path, header: Header, source: Source, splits: list[Split]
) -> Result:
    """The predictions of one posterior on every split; the posterior is opened only when there is work."""
    method = header.meta.get("method")
    name = options.integrator or ("plug-in" if method in PLUG_IN_METHODS else "mc")
    integrator = load_integrator(name)
    samples = (
        (options.samples or (None if header.kind == "samples" else DEFAULT_SAMPLES)) if integrator.is_sampling else None
    )
    if (
        options.samples is not None
        and not integrator.is_sampling
        and (options.integrator or len(options.posterior) == 1)
    ):
        raise UsageError(f"--samples: the integrator {name} makes no draws")
    keep = options.keep_samples and integrator.is_sampling
    stored = header.meta.get("metrics", {})
    num_draws = samples or stored.get("chains", 0) * stored.get("draws", 0)
    kind = "samples" if header.kind == "samples" else str(header.meta.get("type"))
    if not can_use(name, kind):
        refusal = UsageError(
            f"--integrator {name} does not work for a {kind} posterior ({path.stem})",
            hint=f"integrators for a {kind} posterior: {', '.join(usable(kind))}",
            code="unsupported_integrator",
        )
        if options.posterior:
            raise refusal
        run.console.warn(f"skipping {path.stem}: {refusal.message}")
        return Result()
    opened: list[Any] = []
    total = Result()
    for split in splits:
        label = run.naming.name or f"{path.stem}.{name}"
        target = Path(run.naming.out) if run.naming.out else run.folder.predictions(label, split.content.name)
        seed = run.compute.seed if integrator.is_sampling else None
        params: dict[str, Any] = {"integrator": name, "samples": samples, "posterior": path.stem, "seed": seed}
        params["keep_samples"] = keep
        size = len(split.content.features) * (4 * len(split.content.classes) + 32)
        if keep:
            size += 2 * num_draws * len(split.content.features) * len(split.content.classes)
        request = Request(
            target,
            "predictions",
            f"predictions.{label}.{split.content.name}",
            params,
            ALGO_REV,
            [split.source, source],
            split.checkpoint,
            size,
        )

        def compute(split: Split = split, target: Path = target, params: dict[str, Any] = params) -> Computed:
            if not opened:
                opened.append(open_posterior(path)[0].to(run.device))
            return _compute(run, opened[0], split, target, params)

        total.add(produce(run, request, compute))
    return total


def _compute(run: Run, posterior: Any, split: Split, path: Path, params: dict[str, Any]) -> Computed:
    if posterior.layout != split.layout and split.content.head_weight is not None:
        raise DataError(
            f"the posterior is for {posterior.layout}, split {split.content.name!r} has {split.layout}",
            code="wrong_layout",
        )
    if posterior.layout.num_classes != len(split.content.classes):
        raise DataError(
            f"split {split.content.name!r} has {len(split.content.classes)} classes, the posterior "
            f"{posterior.layout.num_classes}",
            code="class_mismatch",
        )
    if posterior.layout.num_features != split.content.features.shape[1]:
        raise DataError(
            f"split {split.content.name!r} has {split.content.features.shape[1]} features, the posterior {posterior.layout.num_features}",
            code="wrong_layout",
        )
    integrator, parts, kept = load_integrator(params["integrator"]), [], []
    for features in split.feature_blocks(run.device):
        draws: dict[str, Any] = {"num_samples": params["samples"]}  # of the same stream: the same draws for every block
        draws["generator"] = run.stream("predict/draws")
        parts.append(integrator.predict(posterior, features, progress=run.console, **draws))
        if params["keep_samples"]:
            draws["generator"] = run.stream("predict/draws")
            kept.append(probs_of_draws(posterior, features, **draws))
    prediction = join(parts)
    samples = torch.cat(kept, dim=1).numpy() if kept else None
    content = PredictionFile(
        probs=prediction.probs.numpy(),
        entropy=prediction.entropy.numpy(),
        mutual_info=None if prediction.mutual_info is None else prediction.mutual_info.numpy(),
        labels=split.content.labels,
        sample_id=split.content.sample_id,
        classes=split.content.classes,
        probs_samples=samples,
    )
    meta = {
        "posterior": params["posterior"],
        "integrator": params["integrator"],
        "samples": params["samples"],
        "split": split.content.name,
        "is_ood": split.content.is_ood,
        "is_labeled": split.content.labels is not None,
        "num_examples": len(content.probs),
        "order_digest": split.content.header.meta.get("order_digest") if split.content.header else None,
    }

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_predictions(path, content, meta=meta, provenance=provenance, may_replace=may_replace)

    return Computed(publish)
