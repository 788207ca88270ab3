"""diagnose: every posterior of the run judged against its target, and one sentence that says which to use."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.errors import CheckFailed, DataError, MissingInput, Untrusted
from bnncli.evaluation.draw_blocks import compare_draws
from bnncli.evaluation.mmd import median_bandwidth, mmd2_of, squared_distances
from bnncli.evaluation.verdict import POINTS, Commands, Judged, Verdict, doubts, give_verdict
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.options import ComputeOptions, DiagnoseOptions, InputOptions
from bnncli.options.command import READ, Command
from bnncli.options.layers import LayersOptions
from bnncli.run.inputs import load_split, posterior_source, recorded_prior
from bnncli.run.layers_selection import over_layers
from bnncli.run.named_posterior import find_named
from bnncli.run.produce import expected
from bnncli.run.session import Result, Run, source_json
from bnncli.stages.diagnose.layers import SeenSplits, gains_of_layers
from bnncli.stages.diagnose.tables import diagnosis_tables
from bnncli.storage.artifacts import read_header
from bnncli.storage.headers import Header
from bnncli.storage.provenance import Source
from bnncli.theta.layout import ClassifierLayout
from bnncli.theta.prior import Prior

if TYPE_CHECKING:
    from bnncli.stages.diagnose.diagnosis import Diagnosis

COMMAND = Command(
    "Judge every posterior against its target: ELBO, Pareto k, evidence, R-hat, MMD^2; say which to use.",
    "A Gaussian or flow is good when its log importance weights spread by at most 2 nats and Pareto k is below its "
    "threshold; draws are good with R-hat at most 1.05, 400 effective draws and no divergence. Fit to the target and "
    "prediction (NLL on the val split) are told apart. Nothing is written.",
    (DiagnoseOptions, InputOptions, ComputeOptions, *READ),
    (
        "bnncli diagnose ckpt.pt",
        "bnncli diagnose ckpt.pt --posterior laplace --strict --json | jq .verdict",
        "bnncli diagnose ckpt.pt --layers all",
    ),
    place=110,
)


def run(run: Run, options: DiagnoseOptions) -> Result:
    """Judge and print; nothing is written."""
    train = load_split(run, "train").check_labeled()
    val = load_split(run, "val") if run.folder.features("val").is_file() else None
    seen = SeenSplits(run, options, train, val)
    found = _open(run, options, train.layout, seen)
    from bnncli.stages.diagnose.diagnosis import diagnose  # the work: slow to import
    from bnncli.stages.diagnose.memory import require_room

    planned = require_room(run, options, [header for _, header, _ in found.values()], seen)
    run.console.debug(f"computing on {run.device}{expected(planned)}")
    diagnoses = []
    for name, (path, header, _) in found.items():
        run.console.poll(f"diagnose {name}")
        diagnoses.append(diagnose(run, options, path, name=name, **seen.by(header)))
    pairs = _pairs(run, diagnoses)
    headers = {name: header for name, (_, header, _) in found.items()}
    diagnoses = _with_comparisons(diagnoses, pairs, headers)
    verdict = give_verdict([one.judged for one in diagnoses], _commands(run, options, diagnoses, headers))
    entries = {one.judged.name: one.entry for one in diagnoses}
    gains = gains_of_layers(diagnoses)
    used = [part.source for part in (train, val) if part is not None] + [source for _, _, source in found.values()]
    return Result(
        extra={
            "posteriors": entries,
            "pairs": pairs,
            **({"layers": [gain.to_json() for gain in gains]} if gains else {}),
            "verdict": _verdict_json(verdict),
            "inputs": [source_json(source) for source in used],
            "environment": run.environment(),
        },
        tables=diagnosis_tables(entries, pairs),
        lines=[verdict.sentence, *(gain.sentence for gain in gains)],
        failure=None if verdict.is_good or not options.strict else _failure(verdict),
    )


def _open(
    run: Run, options: DiagnoseOptions, layout: ClassifierLayout, seen: SeenSplits
) -> dict[str, tuple[Path, Header, Source]]:
    """The posteriors to judge, by name, or by path when they lie elsewhere.

    Stale ones are skipped with a warning unless they were named, and so are those whose network or inputs cannot be opened.
    """
    if options.posterior:
        named = dict.fromkeys(options.posterior)
        otherwise, trusts = run.suggest("status"), options.trust_code
        paths = [find_named(run, name, flag="--posterior", otherwise=otherwise, trust_code=trusts) for name in named]
    else:
        paths = run.folder.posteriors()
    if not paths:
        raise MissingInput(
            f"{run.checkpoint_path} has no posteriors",
            hint=run.suggest("fit-laplace"),
            path=run.folder.root / "posteriors",
        )
    found = {}
    for path in over_layers(
        run, options.layers, paths, are_named=bool(options.posterior), trust_code=options.trust_code
    ):
        is_own = path.resolve().parent == (run.folder.root / "posteriors").resolve()
        try:
            header, source = posterior_source(run, path, "posterior")
            _check_is_of_head(path, header, layout)
            _ = seen.by(header)
            found[path.stem if is_own else str(path)] = (path, header, source)
        except (DataError, MissingInput, Untrusted) as error:
            if options.posterior or (options.layers is not None and isinstance(error, Untrusted)):
                raise
            run.console.warn(f"skipping {path.stem}: {error.message}{error.advice}")
    if not found:
        raise DataError(
            "no posterior of the run can be diagnosed: each is stale, or a network of its own",
            code="stale_input",
            hint=f"{run.suggest('status')} tells which; {run.suggest('evaluate')} judges predictions of any",
        )
    return found


def _check_is_of_head(path: Path, header: Header, layout: ClassifierLayout) -> None:
    """Raise DataError for a network of its own: with hidden layers, or a single logit where the last layer has two."""
    sizes = header.meta.get("sizes", ())
    if len(sizes) > 2:
        raise DataError(f"{path} has hidden layers of its own; only posteriors over the last layer are diagnosed")
    if sizes and sizes[1] != layout.num_outputs and likelihood_of(sizes[1]).num_classes == layout.num_classes:
        raise DataError(f"{path} has a single logit, other posteriors of this run have two; only those are diagnosed")


def _pairs(run: Run, diagnoses: list[Diagnosis]) -> list[dict[str, Any]]:
    """MMD^2 between all pairs of posteriors over the same parameters, with one bandwidth for all of those, its standard error and p-value."""
    groups = {
        layers: [one for one in diagnoses if one.judged.layers == layers]
        for layers in {d.judged.layers: None for d in diagnoses}
    }
    bandwidths = {layers: _bandwidth(run, group) for layers, group in groups.items() if len(group) > 1}
    both = [pair for group in groups.values() for pair in combinations(group, 2)]
    task = run.console.task("mmd", len(both))
    pairs = []
    for one, other in both:
        chosen = bandwidths[one.judged.layers]
        pair: dict[str, Any] = {
            "posteriors": [one.judged.name, other.judged.name],
            "is_same_target": one.judged.target is not None and one.judged.target == other.judged.target,
            "unbiased": None,
            "biased": None,
            "standard_error": None,
            "p_value": None,
            "n": [len(side.draws.draws) for side in (one, other)],
        }
        finite = [side.judged.name for side in (one, other) if not torch.isfinite(side.draws.draws).all()]
        single = [side.judged.name for side in (one, other) if len(side.draws.draws) < 2]
        if finite:
            pair["reason"] = f"draws of {' and '.join(finite)} are not finite"
        elif single:
            pair["reason"] = f"a distance needs at least two draws of each; there is one of {' and '.join(single)}"
        elif chosen is None:
            pair["reason"] = "no posterior whose draws tell a bandwidth"
        else:
            pair |= _distance(run, one, other, chosen)
        pairs.append(pair)
        task.advance()
    return pairs


def _bandwidth(run: Run, diagnoses: list[Diagnosis]) -> tuple[str, float] | None:
    """The posterior whose draws set the kernel's bandwidth, chains before others, and that bandwidth."""
    distributions = [
        one for one in diagnoses if one.judged.type not in POINTS and bool(torch.isfinite(one.draws.draws).all())
    ]
    for one in sorted(distributions, key=lambda one: one.judged.type != "samples"):
        try:
            return one.judged.name, median_bandwidth(one.draws.draws.to(run.device))
        except DataError:  # chains that stand still have no scale
            continue
    return None


def _distance(run: Run, one: Diagnosis, other: Diagnosis, chosen: tuple[str, float]) -> dict[str, Any]:
    """MMD^2 of two posteriors with its p-value, and what defines both."""
    name, bandwidth = chosen
    x, y = (side.draws.to(run.device) for side in (one, other))
    distances = squared_distances(x.draws, y.draws)
    generator = run.stream(f"diagnose/permutations/{one.judged.name}/{other.judged.name}")
    compared = compare_draws(x, y, distances, bandwidth, generator=generator)
    found: dict[str, Any] = {
        "unbiased": compared.value,
        "biased": mmd2_of(distances, bandwidth).biased,
        "standard_error": compared.standard_error,
        "p_value": compared.p_value,
        "kernel": "rbf",
        "bandwidth": bandwidth,
        "bandwidth_of": name,
        "permutations": compared.num_permutations,
        "blocks": compared.num_blocks,
    }
    return found if compared.untested is None else found | {"reason": compared.untested}


def _with_comparisons(
    diagnoses: list[Diagnosis], pairs: list[dict[str, Any]], headers: dict[str, Header]
) -> list[Diagnosis]:
    """The diagnoses with their distance to good draws of the same target, and their val NLL over the lowest, paired."""
    scored = [one.losses for one in diagnoses if one.losses is not None]
    lowest = min(scored, key=lambda losses: float(losses.mean()), default=None)
    # Few or stuck draws cannot show a difference: that they show none says nothing.
    chains = [one.judged.name for one in diagnoses if one.judged.type == "samples" and not doubts(one.judged)]
    tuned = {_aim(header) for header in headers.values() if header.meta.get("criterion") == "val"}
    compared = []
    for one in diagnoses:
        is_tuned = one.judged.aim in tuned
        has_seen_val = is_tuned or _was_tuned_on_val(headers[one.judged.name])
        judged = replace(one.judged, is_tuned=is_tuned, has_seen_val=has_seen_val)
        for pair in pairs:
            other = next((name for name in pair["posteriors"] if name != judged.name), judged.name)
            if (
                judged.reference is None
                and pair["is_same_target"]
                and other in chains
                and judged.name in pair["posteriors"]
            ):
                judged = replace(judged, reference=other, mmd2=pair["unbiased"], mmd_p=pair["p_value"])
        if one.losses is not None and lowest is not None:
            excess = one.losses - lowest
            error = float(np.std(excess, ddof=1) / len(excess) ** 0.5) if len(excess) > 1 else None
            judged = replace(judged, nll_excess=float(excess.mean()), nll_excess_error=error)
            one.entry["val_nll"] |= {
                "excess": judged.nll_excess,
                "excess_standard_error": error,
                "tuned_on_val": has_seen_val,
            }
        compared.append(replace(one, judged=judged))
    return compared


def _aim(header: Header) -> tuple[str | None, Prior | None]:
    """What a posterior was fitted to, as Judged.aim has it."""
    return header.meta.get("layers"), recorded_prior(header)


def _was_tuned_on_val(header: Header) -> bool:
    """Whether something of a posterior other than its prior precision was chosen by the NLL of the val split."""
    searched = header.meta.get("metrics", {}).get("slab_sd_search")
    return header.meta.get("method") == "temperature" or searched is not None


def _commands(run: Run, options: DiagnoseOptions, diagnoses: list[Diagnosis], headers: dict[str, Header]) -> Commands:
    """The commands that a verdict may suggest, to be pasted."""

    def sample(judged: Judged) -> str:
        same = [one.judged for one in diagnoses if one.judged.aim == judged.aim]
        if judged.layers is not None:
            return _layers_sampling_command(run, judged.layers, same, headers)
        return _sampling_command(run, options, same, headers)

    def predict(name: str) -> str:
        is_of_layers = headers[name].meta.get("layers") is not None
        return run.suggest("predict", posterior=name, integrator="mc", trust_code=is_of_layers)

    return Commands(
        predict=predict,
        sample=sample,
        fit=run.suggest("fit-laplace"),
        tune=run.suggest("fit-laplace", prior_precision="val", name="laplace-val"),
    )


def _layers_sampling_command(run: Run, layers: str, same_target: list[Judged], headers: dict[str, Header]) -> str:
    """The same of draws of other layers than the last: about the base that was judged, for longer than those that lie there."""
    bases = [one for one in same_target if one.type != "samples" and one.num_varying is None]
    base = min(bases, key=_distance_of_base).name if bases else None
    fixing = next((one for one in same_target if one.num_varying is not None), None)  # no base for hmc
    drawn = next((judged for judged in same_target if judged.type == "samples"), None)
    usual = f"hmc{LayersOptions(layers).layers_suffix}"
    given: dict[str, Any] = {"layers": layers, "base": base, "trust_code": True}
    if base is None and fixing is not None and fixing.target is not None:
        given["prior_precision"] = fixing.target.weight_precision
    if drawn is None:
        is_there = run.folder.posterior(usual, suffix=".nc").is_file()
        return run.suggest("hmc", **given, name=f"hmc-{base or same_target[0].name}" if is_there else None)
    if base is None and drawn.target is not None and drawn.target.is_isotropic:
        given["prior_precision"] = drawn.target.weight_precision
    name = None if drawn.name == usual else drawn.name
    return run.suggest("hmc", **given, **_twice_as_long(headers[drawn.name]), name=name, force=True)


def _distance_of_base(base: Judged) -> tuple[bool, float]:
    """What bases are ordered by: Gaussians before others, as they whiten, the nearest to the target first."""
    return base.type != "gaussian", math.inf if base.log_weight_sd is None else base.log_weight_sd


def _twice_as_long(header: Header) -> dict[str, int]:
    """Options of hmc for draws like these, twice as many."""
    params = header.provenance.get("params", {})
    return {key: 2 * int(params[key]) for key in ("warmup", "draws") if params.get(key)}


def _sampling_command(run: Run, options: DiagnoseOptions, same_target: list[Judged], headers: dict[str, Header]) -> str:
    """The command that gives draws of a target: for longer than those judged; or to judge those that lie there."""
    bases = [judged.name for judged in same_target if judged.type != "samples"]
    given: dict[str, Any] = {"base": bases[0]} if bases and "laplace" not in bases else {}
    drawn = next((judged for judged in same_target if judged.type == "samples"), None)
    if drawn is not None:
        name, is_again = drawn.name, True
        if not bases and drawn.target is not None and drawn.target.is_isotropic:
            given = {"prior_precision": drawn.target.weight_precision}
        elif not bases:  # no option of hmc says two precisions, and no artifact is made from itself
            name, given, is_again = f"{drawn.name}-longer", {"base": drawn.name}, False
        given |= _twice_as_long(headers[drawn.name])
        return run.suggest("hmc", **given, name=name if name != "hmc" else None, force=is_again)
    path = run.folder.posterior("hmc", suffix=".nc")
    if not path.is_file():
        return run.suggest("hmc", **given)
    if recorded_prior(read_header(path)) != same_target[0].target:
        return run.suggest("hmc", **given, name=f"hmc-{bases[0]}")
    if options.posterior:  # there, and not among those named
        return run.suggest("diagnose", posterior=[*options.posterior, "hmc"])
    return run.suggest("hmc", **given, force=True)  # there, and skipped as stale


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    target = verdict.target
    return {
        "sentence": verdict.sentence,
        "use": verdict.use,
        "prior_precision": None if target is None else target.weight_precision,
        "bias_precision": None if target is None or target.is_isotropic else target.bias_precision,
        "is_good": verdict.is_good,
        "run": verdict.run,
        "predicts_best": verdict.predicts_best,
        "predicts_worse": verdict.is_worse,
    }


def _failure(verdict: Verdict) -> CheckFailed:
    return CheckFailed(
        "--strict: no posterior that was judged is good for its target", hint=verdict.run, code="no_good_posterior"
    )
