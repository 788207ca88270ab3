"""calibrate: predictions of a split that chose nothing else in, rules with guarantees out, one file a rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import RULE_KIND, write_decision
from bnncli.artifacts.predictions import stored_arrays
from bnncli.artifacts.provenance import Source
from bnncli.decisions import OOD, RISK, SETS, SHIFT
from bnncli.errors import BnnError, CheckFailed, DataError, MissingInput, UsageError
from bnncli.evaluation.detectors import DEFAULT_SCORE, default_score
from bnncli.options.calibrate import CalibrateOptions
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.session import revisions as _revisions
from bnncli.session.decisions import maker_of
from bnncli.session.predictions import PredictionGroup, open_groups
from bnncli.session.produce import Computed, Request, produce
from bnncli.session.recommendation import recommended
from bnncli.session.run import Result, Run
from bnncli.session.splits import fresh_split, require_unused
from bnncli.stages.calibrate.report import said

COMMAND = Command(
    "Calibrate decisions with guarantees: prediction sets, acceptance, outliers, shift.",
    "Needs predictions on a split that was not used for fitting or model selection, such as one set aside with "
    "extract-features --hold-out calib=test:2000. predict adds the decisions to its table; evaluate reports how "
    "they perform. Exits 3 if no threshold meets --risk. Writes "
    "decisions/<posterior>.<integrator>/<rule>.safetensors.",
    (CalibrateOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli calibrate ckpt.pt --sets lac --coverage 0.9",
        "bnncli calibrate ckpt.pt --posterior laplace --risk 0.02 --confidence 0.95 --false-alarm 0.05 --shift-level 0.01",
        "bnncli calibrate ckpt.pt --sets raps --class-conditional --name by-class",
    ),
    section="Use",
    place=20,
)


def run(run: Run, options: CalibrateOptions) -> Result:
    """Fit and publish every rule that was asked for, for every group of predictions; the result's metrics are by rule."""
    options.check_together()
    groups = _groups(run, options)
    if len(options.kinds) * len(groups) > 1 and run.naming.out is not None:
        raise UsageError(
            "--out FILE holds one rule of one posterior: ask for one rule and give --posterior and --integrator"
        )
    if len(options.kinds) > 1 and run.naming.name is not None:
        raise UsageError("--name names one rule: give only one of --sets, --risk, --false-alarm, --shift-level")
    run.require_device()
    total = Result()
    rules: list[dict[str, Any]] = []
    for group, header in groups:
        require_unused(run, group, header)
        for kind in options.kinds:
            result = _calibrate(run, options, kind, group, header)
            total.add(result)
            if result.metrics:
                rules.append({"rule": kind, "posterior": group.posterior, "variant": group.variant, **result.metrics})
    total.extra["rules"] = rules
    return total


def _groups(run: Run, options: CalibrateOptions) -> list[tuple[PredictionGroup, Header]]:
    """The predictions to calibrate, each with the header of those of the split.

    Raises:
        MissingInput: none has predicted the split; with the command that does.
        DataError: the split is out-of-distribution.
    """
    posterior, integrator = options.posterior, options.integrator
    if posterior is None and integrator is None and (found := recommended(run)) is not None:
        posterior, integrator = found.posterior, found.integrator
        run.console.info(
            f"using {posterior} ({integrator}), which auto recommends; choose another with --posterior NAME"
        )
    if not run.folder.features(options.split).is_file() and run.folder.splits():
        raise MissingInput(
            f"{run.checkpoint_path} has no split {options.split!r} (have: {', '.join(run.folder.splits())})",
            hint=fresh_split(run, options.split),
            path=run.folder.features(options.split),
        )
    posteriors, integrators = ([name] if name else [] for name in (posterior, integrator))
    groups = open_groups(run, posteriors=posteriors, integrators=integrators)
    chosen = []
    for group in groups:
        if options.split in group.splits(is_ood=True):
            message = (
                f"split {options.split!r} is out-of-distribution, but the guarantees hold only for examples like "
                "the calibration split"
            )
            raise DataError(message, code="ood_split", hint=fresh_split(run, options.split))
        header = group.splits(is_ood=False).get(options.split)
        if header is not None:
            chosen.append((group, header))
        elif posterior is None:
            run.console.warn(f"skipping {group.name}: it has no predictions for split {options.split!r}")
    if not chosen:
        hint = run.suggest("predict", posterior=posterior, integrator=integrator, split=options.split)
        raise MissingInput(f"no predictions of split {options.split!r}", hint=hint)
    return chosen


def _calibrate(run: Run, options: CalibrateOptions, kind: str, group: PredictionGroup, header: Header) -> Result:
    """One rule for one group of predictions."""
    if options.score is None:
        options = replace(options, score=default_score([stored_arrays(header.path)]))
        if options.score != DEFAULT_SCORE and kind in (OOD, SHIFT):
            run.console.info(
                f"{group.name}: using the {options.score} score, because its predictions lack the {DEFAULT_SCORE} score"
            )
    if kind in (OOD, SHIFT) and options.score == DEFAULT_SCORE and options.split == "val":
        message = (
            f"split 'val' cannot calibrate {group.name} with the {DEFAULT_SCORE} score, which uses ranks within val"
        )
        raise DataError(message, code="split_was_used", hint=fresh_split(run, options.split), path=header.path)
    settings = options.settings(kind, run.compute.seed)
    named = run.folder.decision(group.name, run.naming.name or kind)
    target = Path(run.naming.out) if run.naming.out else named
    source = Source(f"predictions.{options.split}", header.path, header.content_digest)
    checkpoint = header.provenance.get("checkpoint")
    if kind in (SETS, RISK) and not header.meta.get("is_labeled"):
        message = f"split {options.split!r} has no labels; sets and risk need them"
        raise DataError(message, code="no_labels", path=header.path)
    request = Request(
        target,
        RULE_KIND,
        f"{RULE_KIND}.{group.name}.{target.stem}",
        {"rule": kind, **settings},
        _revisions.CALIBRATE,
        [source],
        checkpoint,
        lambda: 8 * int(header.meta["num_examples"]) + (1 << 12),
    )

    def compute() -> Computed:
        from bnncli.stages.calibrate.work import fit_rule

        rule, classes, metrics = fit_rule(header, kind, settings, is_tuned=options.is_tuned)
        names = ("posterior", "integrator", "split", "num_examples")
        meta = {name: header.meta[name] for name in names} | {"variant": group.variant, "rule": kind}
        meta |= {"classes": classes, "settings": settings, "maker": maker_of(header), "metrics": metrics}

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_decision(target, rule, meta=meta, provenance=provenance, may_replace=may_replace)

        return Computed(publish, metrics, [f"{group.name}: {said(kind, settings, metrics)}"], _failure(kind, metrics))

    def when_fresh(found: Header) -> Computed:
        metrics = found.meta["metrics"]
        text = f"{group.name}: {said(kind, settings, metrics)}"
        return Computed(lambda provenance, may_replace: found.content_digest, metrics, [text], _failure(kind, metrics))

    return produce(run, request, compute, when_fresh=when_fresh)


def _failure(kind: str, metrics: dict[str, Any]) -> BnnError | None:
    """Of a risk that no threshold is shown to meet: the rule accepts nothing."""
    if kind != RISK or metrics["most_doubt"] is not None:
        return None
    tried = (
        f"of the {metrics['num_accepted']} most confident predictions, {metrics['num_wrong']} are wrong; "
        if metrics["num_accepted"]
        else ""
    )
    return CheckFailed(
        f"no threshold reaches the requested risk: {tried}the rule accepts nothing",
        code="no_threshold",
        hint="use a larger --risk, or calibrate on more examples",
    )
