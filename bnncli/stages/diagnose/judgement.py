"""The judgement of diagnose: every posterior of the run that was asked for, the distances between them, the verdict on all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.errors import DataError, MissingInput, Untrusted
from bnncli.evaluation.draw_blocks import compare_draws
from bnncli.evaluation.excess import Scored, excesses
from bnncli.evaluation.layer_gain import LayerGain
from bnncli.evaluation.mmd import median_bandwidth, mmd2_of, squared_distances
from bnncli.evaluation.recommendation import PLAIN, Predictive, recommend, sentence
from bnncli.evaluation.verdict import LINEAR_DRAWS, POINTS, Verdict, doubts, give_verdict
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.options.diagnose import DiagnoseOptions
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split, load_split, posterior_source, recorded_prior
from bnncli.session.out_of_fold import fit_on
from bnncli.session.predictions import find_named, over_layers
from bnncli.session.produce import expected
from bnncli.session.recommendation import Recommended, recommended
from bnncli.session.run import Run
from bnncli.session.states import after_predictions
from bnncli.session.val_report import network_on_val
from bnncli.stages.diagnose.commands import commands
from bnncli.stages.diagnose.layers import SeenSplits, gains_of_layers

if TYPE_CHECKING:
    from bnncli.stages.diagnose.diagnosis import Diagnosis


@dataclass(frozen=True)
class Judgement:
    """What is known of the posteriors of a run.

    Args:
        diagnoses: of each, with its distance to good draws and its val NLL over the lowest.
        pairs: distances between posteriors over the same parameters.
        recommended: what to predict with; None without a labelled val split, or where there is nothing to predict with.
        gains: of posteriors over other layers over one of the last.
        sources: what all was judged from.
        headers: of the posteriors by name.
        val: the split whose labels they are held against; None where there is none.
    """

    diagnoses: list[Diagnosis]
    pairs: list[dict[str, Any]]
    verdict: Verdict
    recommended: Recommended | None
    gains: list[LayerGain]
    sources: list[Source]
    headers: dict[str, Header]
    val: Split | None

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """What \0json\0 says of each posterior, by name."""
        return {one.judged.name: one.entry for one in self.diagnoses}


def judge(run: Run, options: DiagnoseOptions, *, leave_out: Collection[Path] = ()) -> Judgement:
    """The judgement of the posteriors that are named, or of all.

    Args:
        leave_out: files that are not looked at where none is named.

    Raises:
        MissingInput: there are no features, or no posteriors.
        DataError: none can be judged; one that was named is stale or damaged.
        DeviceError: there is no room.
    """
    train = load_split(run, "train").check_labeled()
    val = load_split(run, "val") if run.folder.features("val").is_file() else None
    seen = SeenSplits(run, options, train, val)
    found = _open(run, options, train.layout, seen, leave_out)
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
    points = {} if val is None or val.content.labels is None else network_on_val(run, val)[0]
    plain = min(points, key=lambda key: points[key].nll, default="")
    baseline = points.get(plain)
    diagnoses = _with_comparisons(diagnoses, pairs, headers, baseline)
    found_before = None if run.folder.recommended in leave_out else _recommended(run)
    chosen = found_before or _recommend(run, diagnoses, headers, baseline, plain)
    prediction = (
        "no labelled val split, so it is unknown which posterior predicts best" if chosen is None else chosen.sentence
    )
    verdict = give_verdict([one.judged for one in diagnoses], commands(run, options, diagnoses, headers), prediction)
    if verdict.is_good and chosen is not None:
        verdict = replace(verdict, run=_to_predict(run, chosen, headers))
    sources = [part.source for part in (train, val) if part is not None] + [source for _, _, source in found.values()]
    return Judgement(diagnoses, pairs, verdict, chosen, gains_of_layers(diagnoses), sources, headers, val)


def _recommended(run: Run) -> Recommended | None:
    """What auto recommends; None without a recommendation that can be used."""
    try:
        return recommended(run)
    except DataError as error:
        run.console.warn(f"{error.message}{error.advice}")
        return None


def _to_predict(run: Run, chosen: Recommended, headers: dict[str, Header]) -> str:
    """The command that predicts with what is recommended, or first fits the temperature; that after it where it has been predicted."""
    following = after_predictions(run, f"{chosen.posterior}.{chosen.integrator}")
    if following is not None:
        return following
    if chosen.by == "auto":
        return run.suggest("predict")
    if chosen.posterior not in {path.stem for path in run.folder.posteriors()}:
        return run.suggest("fit-temperature")
    header = headers.get(chosen.posterior)
    is_of_layers = header is not None and header.meta.get("layers") is not None
    return run.suggest("predict", posterior=chosen.posterior, integrator=chosen.integrator, trust_code=is_of_layers)


_SIMPLEST_FIRST = (*POINTS, "stack", "gaussian", "flow", LINEAR_DRAWS, "samples")


def _recommend(
    run: Run, diagnoses: list[Diagnosis], headers: dict[str, Header], baseline: Scored | None, key: str
) -> Recommended | None:
    """The recommendation among the posteriors that were judged, by the rule of auto; None without scores on val."""

    def simplicity(one: Diagnosis) -> tuple[bool, int]:
        kind = one.judged.type
        return one.judged.layers is not None, _SIMPLEST_FIRST.index(kind) if kind in _SIMPLEST_FIRST else 99

    candidates = []
    for one in sorted(diagnoses, key=simplicity):
        meta = headers[one.judged.name].meta
        is_network = one.judged.type == "point" and meta.get("base") is None and baseline is not None
        if one.scored is not None and one.predicted_by is not None and not is_network:
            is_stack = one.judged.type == "stack"
            candidates.append(Predictive(one.judged.name, one.predicted_by[0], one.scored, has_network=is_stack))
    if baseline is None and not candidates:
        return None
    plain, words = "map" if key == "network" else key, PLAIN.get(key, "")
    found = recommend(candidates, baseline, words=words)
    text = sentence(found, baseline, plain, words)
    if found.chosen is not None:
        return Recommended(found.chosen.posterior, found.chosen.integrator, text, by="diagnose")
    return Recommended(plain, "plug-in", text, by="diagnose")


def _open(
    run: Run, options: DiagnoseOptions, layout: ClassifierLayout, seen: SeenSplits, leave_out: Collection[Path]
) -> dict[str, tuple[Path, Header, Source]]:
    """The posteriors to judge, by name, or by path when they lie elsewhere.

    Stale ones are skipped with a warning unless they were named, and so are those whose network or inputs cannot be opened.
    """
    if options.posterior:
        named = dict.fromkeys(options.posterior)
        otherwise, trusts = run.suggest("status"), options.trust_code
        paths = [find_named(run, name, flag="--posterior", otherwise=otherwise, trust_code=trusts) for name in named]
    else:
        paths = [path for path in run.folder.posteriors() if path not in leave_out]
    if not run.folder.root.is_dir():
        raise run.no_run()
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
            "no posterior of the run can be diagnosed: each is stale or a separate network",
            code="stale_input",
            hint=f"see {run.suggest('status')}; {run.suggest('evaluate')} scores the predictions of any posterior",
        )
    return found


def _check_is_of_head(path: Path, header: Header, layout: ClassifierLayout) -> None:
    """Raise DataError for a network of its own: with hidden layers, a single logit where the last layer has two, or a bias where that has none."""
    if header.meta.get("type") == "mixture":
        raise DataError(f"{path} covers the last layers of several networks, which have no common target")
    sizes = header.meta.get("sizes", ())
    if len(sizes) > 2:
        raise DataError(f"{path} has its own hidden layers; diagnose takes only posteriors over the last layer")
    if sizes and sizes[1] != layout.num_outputs and likelihood_of(sizes[1]).num_classes == layout.num_classes:
        raise DataError(
            f"{path} has a single logit, but other posteriors of this run have two; diagnose takes only "
            "posteriors with two"
        )
    if sizes and layout.num_params == layout.num_outputs * layout.num_features:
        raise DataError(
            f"{path} has a bias, but other posteriors of this run have none; diagnose takes only posteriors without one"
        )


def _pairs(run: Run, diagnoses: list[Diagnosis]) -> list[dict[str, Any]]:
    """MMD^2 between all pairs of posteriors over the same parameters, with one bandwidth for all of those, its standard error and p-value."""
    groups = {
        layers: [one for one in diagnoses if one.judged.layers == layers]
        for layers in {d.judged.layers: None for d in diagnoses}
    }
    bandwidths = {layers: _bandwidth(run, group) for layers, group in groups.items() if len(group) > 1}
    both = [
        pair
        for group in groups.values()
        for pair in combinations(group, 2)
        if not all(one.judged.type in POINTS for one in pair)  # two networks have no distance that says anything
    ]
    if not both:
        return []
    task = run.console.task("mmd", len(both))
    pairs = []
    for one, other in both:
        chosen = bandwidths[one.judged.layers]
        pair: dict[str, Any] = {
            "posteriors": [one.judged.name, other.judged.name],
            "is_same_target": one.judged.target is not None and one.judged.aim == other.judged.aim,
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
            pair["reason"] = (
                f"a distance needs at least two draws from each posterior; {' and '.join(single)} {'has' if len(single) == 1 else 'have'} one"
            )
        elif chosen is None:
            pair["reason"] = "no posterior has draws to set a bandwidth with"
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
    diagnoses: list[Diagnosis], pairs: list[dict[str, Any]], headers: dict[str, Header], baseline: Scored | None
) -> list[Diagnosis]:
    """The diagnoses with their distance to good draws of the same target, and their val NLL over the lowest and the network's, paired."""
    scored = [one.losses for one in diagnoses if one.losses is not None]
    lowest = min(scored, key=lambda losses: float(losses.mean()), default=None)
    # Few or stuck draws cannot show a difference: that they show none says nothing.
    chains = [one.judged.name for one in diagnoses if one.judged.type == "samples" and not doubts(one.judged)]
    tuned = {_aim(header) for header in headers.values() if header.meta.get("criterion") == "val"}
    compared = []
    for one in diagnoses:
        is_tuned = one.judged.aim in tuned
        has_seen_val = is_tuned or _was_tuned_on_val(headers[one.judged.name])
        is_worse = one.scored is not None and baseline is not None and excesses(one.scored, [baseline])[0].is_worse
        judged = replace(one.judged, is_tuned=is_tuned, is_worse=is_worse)
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
            one.entry["val_nll"] |= {
                "excess": float(excess.mean()),
                "excess_standard_error": error,
                "tuned_on_val": has_seen_val,
            }
        compared.append(replace(one, judged=judged))
    return compared


def _aim(header: Header) -> tuple[str | None, Prior | None, str]:
    """What a posterior was fitted to, as Judged.aim has it."""
    return header.meta.get("layers"), recorded_prior(header), fit_on(header)


def _was_tuned_on_val(header: Header) -> bool:
    """Whether something of a posterior other than its prior precision was chosen by the NLL of the val split."""
    searched = header.meta.get("metrics", {}).get("slab_sd_search")
    return header.meta.get("method") == "temperature" or searched is not None
