"""diagnose: judge every posterior of a run against its target."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.commands.hmc import HmcOptions
from bnncli.errors import CheckFailed, DataError, MissingInput, Untrusted
from bnncli.evaluation.distances import (
    compare_draws,
    comparison_bytes,
    median_bandwidth,
    mmd2_from_distances,
    num_draws_to_compare,
    squared_distances,
)
from bnncli.evaluation.recommendation import (
    PLAIN,
    LayerGain,
    Predictive,
    ScoredPredictive,
    compare_losses,
    independent_values,
    layer_gains,
    recommend,
    recommendation_sentence,
)
from bnncli.evaluation.verdict import (
    DENSITIES,
    LINEAR_DRAWS,
    POINTS,
    Commands,
    PosteriorFacts,
    Verdict,
    give_verdict,
    reasons_against,
)
from bnncli.inference.elbo import MOST_DRAWS
from bnncli.inference.memory import block_bytes, made_draw_bytes, network_bytes
from bnncli.integrators import load_integrator
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.options.command import READ, Command, ComputeOptions, InputOptions, TrackOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.options.shared import INHERIT, LayersOptions, chosen_layers_option, trust_code_option
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split, load_split, posterior_source, read_recorded_prior
from bnncli.session.out_of_fold import read_fitted_splits
from bnncli.session.prediction_memory import PosteriorMemory
from bnncli.session.predictions import find_named, select_by_layers
from bnncli.session.predictor import TrainData, sampling_integrator
from bnncli.session.produce import format_expected_memory
from bnncli.session.recommendation import RecommendedPredictor, open_recommendation
from bnncli.session.run import Result, Run, source_json
from bnncli.session.states import suggest_next_command
from bnncli.session.val_report import gain_table, network_on_val
from bnncli.system.memory import require

if TYPE_CHECKING:
    from bnncli.commands.diagnose.diagnosis import Diagnosis


@dataclass(frozen=True)
class DiagnoseOptions(CheckedOptions):
    """Options of diagnose."""

    posterior: list[str] = option(
        [],
        "Posterior to judge, by name or file. Default: all posteriors in the run.",
        metavar="NAME|FILE",
    )
    layers: str | None = chosen_layers_option(is_recorded=False)
    draws: int | None = option(
        None,
        "Number of draws for the ELBO and Pareto k. Default: 512 to 8192, stopping when the ELBO is known to 2 "
        "nats; fewer for slow networks.",
        minimum=2,
    )
    strict: bool = option(False, "Exit 3 if none of the judged posteriors fits well.")
    trust_code: bool = trust_code_option(is_recorded=False)


COMMAND = Command(
    "Check how closely each posterior matches its target.",
    "A Gaussian or flow fits well if its log importance weights spread by at most 2 nats and Pareto k is below "
    "its threshold. Draws fit well if R-hat is at most 1.05, there are at least 400 effective draws and none "
    "diverged. Also shows which posterior predicts best on val. Writes nothing.",
    (DiagnoseOptions, InputOptions, ComputeOptions, TrackOptions, *READ),
    (
        "bnncli diagnose ckpt.pt",
        "bnncli diagnose ckpt.pt --posterior laplace --strict --json | jq .verdict",
        "bnncli diagnose ckpt.pt --layers all",
    ),
    section="Judge",
    place=30,
)


def execute(run: Run, options: DiagnoseOptions) -> Result:
    """Judge the posteriors and print the verdicts. Nothing is written."""
    from bnncli.commands.diagnose.diagnosis import diagnosis_tables

    found = judge(run, options)
    recommended = found.recommended
    return Result(
        extra={
            "posteriors": found.entries,
            "pairs": found.pairs,
            **({"layers": [gain.to_json() for gain in found.gains]} if found.gains else {}),
            "verdict": _verdict_json(found.verdict) | {"predict": None if recommended is None else asdict(recommended)},
            "inputs": [source_json(source) for source in found.sources],
            "environment": run.environment(),
        },
        tables=[*diagnosis_tables(found.entries, found.pairs), *gain_table(found.headers)],
        lines=[
            found.verdict.sentence,
            *(gain.sentence for gain in found.gains),
            *([] if found.verdict.run in found.verdict.sentence else [f"next: {found.verdict.run}"]),
        ],
        failure=None if found.verdict.is_good or not options.strict else _build_failure(found.verdict),
    )


@dataclass(frozen=True)
class Judgement:
    """Everything that diagnose found about the posteriors of a run.

    Args:
        diagnoses: diagnosis of each posterior, with its distance to good draws and its excess NLL on val.
        pairs: distances between posteriors over the same parameters.
        recommended: posterior and integrator to predict with; None without labelled val, or with nothing to predict with.
        gains: gains of posteriors over other layers relative to one over the last.
        sources: sources of all inputs.
        headers: posterior name to its header.
        val: labelled val split; None without one.
    """

    diagnoses: list[Diagnosis]
    pairs: list[dict[str, Any]]
    verdict: Verdict
    recommended: RecommendedPredictor | None
    gains: list[LayerGain]
    sources: list[Source]
    headers: dict[str, Header]
    val: Split | None

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries of \0json\0 by posterior name."""
        return {one.judged.name: one.entry for one in self.diagnoses}


@dataclass
class SeenSplits:
    """The run's train and val as its posteriors see them: features, which are copied to a GPU once, or the network's inputs."""

    run: Run
    options: DiagnoseOptions
    train: Split
    val: Split | None
    _known: dict[tuple[str | None, str], dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def _data(self) -> TrainData:
        return TrainData(self.run, self.options.trust_code)

    def by(self, header: Header) -> dict[str, Any]:
        """`train` (a target), `val` (a split) and `network` as the posterior with this header sees them, read once; and `data`.

        Raises:
            Untrusted, MissingInput, DataError: its network or its inputs cannot be opened.
        """
        layers, wanted = header.meta.get("layers"), read_fitted_splits(header)
        if (layers, wanted) not in self._known:
            network = None if layers is None else self._data.reader.network_of(str(layers))
            val = None if self.val is None else self._data.seen_by(header, self.val)
            target = self._data.target(header, Prior(1.0))
            self._known[layers, wanted] = {"train": target, "val": val, "network": network, "data": self._data}
        return self._known[layers, wanted]


def judge(run: Run, options: DiagnoseOptions, *, leave_out: Collection[Path] = ()) -> Judgement:
    """Judge the named posteriors, or all.

    Args:
        leave_out: files to skip where none is named.

    Raises:
        MissingInput: the run has no features or no posteriors.
        DataError: no posterior can be judged, or a named one is stale or damaged.
        DeviceError: there is no room.
    """
    train = load_split(run, "train").check_labeled()
    val = load_split(run, "val") if run.folder.features("val").is_file() else None
    seen = SeenSplits(run, options, train, val)
    found = _open(run, options, train.layout, seen, leave_out)
    from bnncli.commands.diagnose.diagnosis import diagnose  # the work: slow to import

    planned = require_room(run, options, [header for _, header, _ in found.values()], seen)
    run.console.debug(f"computing on {run.device}{format_expected_memory(planned)}")
    diagnoses = []
    for name, (path, header, _) in found.items():
        run.console.poll(f"diagnose {name}")
        diagnoses.append(diagnose(run, options, path, name=name, **seen.by(header)))
    pairs = _measure_pairs(run, diagnoses)
    headers = {name: header for name, (_, header, _) in found.items()}
    points = {} if val is None or val.content.labels is None else network_on_val(run, val)[0]
    plain = min(points, key=lambda key: points[key].nll, default="")
    baseline = points.get(plain)
    diagnoses = _add_comparisons(diagnoses, pairs, headers, baseline)
    found_before = None if run.folder.recommended in leave_out else _read_recommendation(run)
    chosen = found_before or _recommend(run, diagnoses, headers, baseline, plain)
    prediction = (
        "no labelled val split, so it is unknown which posterior predicts best" if chosen is None else chosen.sentence
    )
    verdict = give_verdict(
        [one.judged for one in diagnoses], build_commands(run, options, diagnoses, headers), prediction
    )
    if verdict.is_good and chosen is not None:
        verdict = replace(verdict, run=_build_predict_command(run, chosen, headers))
    sources = [part.source for part in (train, val) if part is not None] + [source for _, _, source in found.values()]
    return Judgement(diagnoses, pairs, verdict, chosen, compare_layers(diagnoses), sources, headers, val)


def _open(
    run: Run, options: DiagnoseOptions, layout: ClassifierLayout, seen: SeenSplits, leave_out: Collection[Path]
) -> dict[str, tuple[Path, Header, Source]]:
    """Open the posteriors to judge, by name, or by path if they lie elsewhere.

    Skips stale posteriors, and those whose network or inputs cannot be opened, with a warning unless they were named.
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
    for path in select_by_layers(
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
    """Raise DataError for a posterior over another network: with hidden layers, another number of logits, or an extra bias."""
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


_LIBRARIES = 135 * 2**20  # measured memory of arviz-stats, which fits Pareto k, with its imports


def require_room(run: Run, options: DiagnoseOptions, headers: Sequence[Header], seen: SeenSplits) -> int | None:
    """Return the memory that diagnose takes at its peak beside the inputs, in bytes; None without posteriors over a network.

    The draws of every posterior stay in memory to be compared with all others.

    Raises:
        DeviceError: that is too much.
    """
    kept, peak, libraries, sizes = 0, 0, 0, []
    for header in headers:
        if header.meta.get("layers") is None:
            continue  # a last layer's draws are small
        known = seen.by(header)
        memory = PosteriorMemory.of(header, known["train"].layout)
        libraries = _LIBRARIES if _has_weights(memory, header) else libraries
        peak = max(peak, kept + _estimate_memory(run, options, header, memory, known))
        sizes.append((_count_kept_draws(memory), memory.layout.num_params))
        kept += 4 * _count_kept_draws(memory) * memory.layout.num_params
    if not sizes:
        return None
    comparing = max(comparison_bytes(count, num_params) for count, num_params in sizes) if len(sizes) > 1 else 0
    needed = libraries + max(peak, kept + comparing)
    hint = "name fewer posteriors with \0posterior\0" if len(sizes) > 1 else "use a posterior over fewer \0layers\0"
    require(needed, run.device, what=f"diagnose of {len(sizes)} posteriors over a network", hint=hint)
    return needed


def _estimate_memory(
    run: Run, options: DiagnoseOptions, header: Header, memory: PosteriorMemory, known: dict[str, Any]
) -> int:
    """Return the bytes of memory to judge one posterior."""
    from bnncli.commands.diagnose.diagnosis import VAL_DRAWS

    device, layout, val = run.device, memory.layout, known["val"]
    work = [memory.draw_bytes(_count_kept_draws(memory))]
    if _has_weights(memory, header):
        num_draws = options.draws or MOST_DRAWS
        work.append(
            made_draw_bytes(layout.num_params, num_draws)
            + block_bytes(layout, device, num_draws * known["train"].num_examples)
        )
    if isinstance(val, Split) and val.content.labels is not None:
        name = "plug-in" if memory.kind in POINTS else sampling_integrator(header)
        makes_draws = memory.kind not in (*POINTS, "samples", "linear-draws")
        needs, count = load_integrator(name).needs, len(val.content.features)
        work.append(memory.predicting_bytes(device, needs, count, VAL_DRAWS if makes_draws else None, has_scores=False))
    return memory.posterior_bytes + network_bytes(layout, 0) + max(work)


def _has_weights(memory: PosteriorMemory, header: Header) -> bool:
    """True where a posterior has a density over all parameters, and therefore importance weights."""
    return memory.kind in DENSITIES and "num_varying" not in header.meta


def _count_kept_draws(memory: PosteriorMemory) -> int:
    """Return the number of draws to compare."""
    count = num_draws_to_compare(memory.layout.num_params)
    return min(count, memory.num_stored or count)


def _measure_pairs(run: Run, diagnoses: list[Diagnosis]) -> list[dict[str, Any]]:
    """Return MMD^2, its standard error and p-value for all pairs of posteriors over the same parameters, with one bandwidth."""
    groups = {
        layers: [one for one in diagnoses if one.judged.layers == layers]
        for layers in {d.judged.layers: None for d in diagnoses}
    }
    bandwidths = {layers: _choose_bandwidth(run, group) for layers, group in groups.items() if len(group) > 1}
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
            pair |= _measure_distance(run, one, other, chosen)
        pairs.append(pair)
        task.advance()
    return pairs


def _choose_bandwidth(run: Run, diagnoses: list[Diagnosis]) -> tuple[str, float] | None:
    """Return the posterior whose draws set the kernel's bandwidth, preferably chains, and the bandwidth."""
    distributions = [
        one for one in diagnoses if one.judged.type not in POINTS and bool(torch.isfinite(one.draws.draws).all())
    ]
    for one in sorted(distributions, key=lambda one: one.judged.type != "samples"):
        try:
            return one.judged.name, median_bandwidth(one.draws.draws.to(run.device))
        except DataError:  # chains that stand still have no scale
            continue
    return None


def _measure_distance(run: Run, one: Diagnosis, other: Diagnosis, chosen: tuple[str, float]) -> dict[str, Any]:
    """Return MMD^2 of two posteriors with its p-value, and the choices that define both."""
    name, bandwidth = chosen
    x, y = (side.draws.to(run.device) for side in (one, other))
    distances = squared_distances(x.draws, y.draws)
    generator = run.stream(f"diagnose/permutations/{one.judged.name}/{other.judged.name}")
    compared = compare_draws(x, y, distances, bandwidth, generator=generator)
    found: dict[str, Any] = {
        "unbiased": compared.value,
        "biased": mmd2_from_distances(distances, bandwidth).biased,
        "standard_error": compared.standard_error,
        "p_value": compared.p_value,
        "kernel": "rbf",
        "bandwidth": bandwidth,
        "bandwidth_of": name,
        "permutations": compared.num_permutations,
        "blocks": compared.num_blocks,
    }
    return found if compared.untested is None else found | {"reason": compared.untested}


def _add_comparisons(
    diagnoses: list[Diagnosis],
    pairs: list[dict[str, Any]],
    headers: dict[str, Header],
    baseline: ScoredPredictive | None,
) -> list[Diagnosis]:
    """Add to each diagnosis its distance to good draws of the same target, and its paired excess NLL on val over the best and the network."""
    scored = [one.losses for one in diagnoses if one.losses is not None]
    lowest = min(scored, key=lambda losses: float(losses.mean()), default=None)
    # Few or stuck draws cannot show a difference: that they show none says nothing.
    chains = [one.judged.name for one in diagnoses if one.judged.type == "samples" and not reasons_against(one.judged)]
    tuned = {_read_aim(header) for header in headers.values() if header.meta.get("criterion") == "val"}
    compared = []
    for one in diagnoses:
        is_tuned = one.judged.aim in tuned
        has_seen_val = is_tuned or _was_tuned_on_val(headers[one.judged.name])
        is_worse = (
            one.scored is not None and baseline is not None and compare_losses(one.scored, [baseline])[0].is_worse
        )
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
            groups = None if one.scored is None else one.scored.groups
            excess = independent_values(one.losses - lowest, groups)
            error = float(np.std(excess, ddof=1) / len(excess) ** 0.5) if len(excess) > 1 else None
            one.entry["val_nll"] |= {
                "excess": float(excess.mean()),
                "excess_standard_error": error,
                "tuned_on_val": has_seen_val,
            }
        compared.append(replace(one, judged=judged))
    return compared


def _read_aim(header: Header) -> tuple[str | None, Prior | None, str]:
    """Return what a posterior was fitted to, as in Judged.aim."""
    return header.meta.get("layers"), read_recorded_prior(header), read_fitted_splits(header)


def _was_tuned_on_val(header: Header) -> bool:
    """True where the NLL on val chose something about a posterior other than its prior precision."""
    searched = header.meta.get("metrics", {}).get("slab_sd_search")
    return header.meta.get("method") in ("temperature", "calibration") or searched is not None


def _read_recommendation(run: Run) -> RecommendedPredictor | None:
    """Return auto's recommendation; None where there is none that can be used."""
    try:
        return open_recommendation(run)
    except DataError as error:
        run.console.warn(f"{error.message}{error.advice}")
        return None


_SIMPLEST_FIRST = (*POINTS, "stack", "gaussian", "flow", LINEAR_DRAWS, "samples")


def _recommend(
    run: Run, diagnoses: list[Diagnosis], headers: dict[str, Header], baseline: ScoredPredictive | None, key: str
) -> RecommendedPredictor | None:
    """Recommend one of the judged posteriors by auto's rule; None without scores on val."""

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
    text = recommendation_sentence(found, baseline, plain, words)
    if found.chosen is not None:
        return RecommendedPredictor(found.chosen.posterior, found.chosen.integrator, text, by="diagnose")
    return RecommendedPredictor(plain, "plug-in", text, by="diagnose")


def build_commands(
    run: Run, options: DiagnoseOptions, diagnoses: list[Diagnosis], headers: dict[str, Header]
) -> Commands:
    """Return the commands that a verdict may suggest."""

    def sample(judged: PosteriorFacts) -> str:
        same = [one.judged for one in diagnoses if one.judged.aim == judged.aim]
        if judged.layers is not None:
            return _layers_sampling_command(run, judged.layers, same, headers)
        return _sampling_command(run, options, same, headers)

    def predict(name: str) -> str:
        is_of_layers = headers[name].meta.get("layers") is not None
        following = suggest_next_command(run, f"{name}.mc")
        return following or run.suggest("predict", posterior=name, integrator="mc", trust_code=is_of_layers)

    return Commands(
        predict=predict,
        sample=sample,
        fit=run.suggest("fit-laplace"),
        tune=run.suggest("fit-laplace", prior_precision="val", name="laplace-val"),
    )


def _layers_sampling_command(
    run: Run, layers: str, same_target: list[PosteriorFacts], headers: dict[str, Header]
) -> str:
    """Return the hmc command for other layers than the last: around the judged base, and longer than existing draws."""
    bases = [one for one in same_target if one.type != "samples" and one.num_varying is None]
    base = min(bases, key=_distance_of_base).name if bases else None
    fixing = next((one for one in same_target if one.num_varying is not None), None)  # no base for hmc
    drawn, given_of = _find_exact_draws(same_target), _prior_of_draws(same_target)
    usual = f"hmc{LayersOptions(layers).layers_suffix}"
    given: dict[str, Any] = {"layers": layers, "base": base, "trust_code": True}
    if base is None and fixing is not None and fixing.target is not None:
        given["prior_precision"] = fixing.target.weight_precision
    if base is None:
        given |= given_of
    if drawn is None:
        is_there = run.folder.posterior(usual, suffix=".nc").is_file()
        return run.suggest("hmc", **given, name=f"hmc-{base or same_target[0].name}" if is_there else None)
    return run.suggest("hmc", **given, **_double_draws(drawn.name, headers[drawn.name], usual=usual))


def _distance_of_base(base: PosteriorFacts) -> tuple[bool, float]:
    """Return the sort key of bases: Gaussians first, because they whiten, then by distance to the target."""
    return base.type != "gaussian", math.inf if base.log_weight_sd is None else base.log_weight_sd


def _sampling_command(
    run: Run, options: DiagnoseOptions, same_target: list[PosteriorFacts], headers: dict[str, Header]
) -> str:
    """Return the command that draws from a target, longer than the judged draws, or that judges existing draws."""
    bases = [judged.name for judged in same_target if judged.type != "samples"]
    given: dict[str, Any] = {"base": bases[0]} if bases and "laplace" not in bases else {}
    drawn = _find_exact_draws(same_target)
    if not bases:  # no option of hmc says two precisions: they are those of the draws
        given = _prior_of_draws(same_target) or {"base": same_target[0].name}
    given.setdefault("prior_precision", INHERIT)
    if drawn is not None:
        longer = _double_draws(drawn.name, headers[drawn.name])
        if given.get("base") == drawn.name:  # no artifact is made from itself
            longer = {**longer, "name": f"{drawn.name}-longer", "force": False}
        return run.suggest("hmc", **given, **longer)
    path = run.folder.posterior("hmc", suffix=".nc")
    if not path.is_file():
        return run.suggest("hmc", **given)
    if read_recorded_prior(read_header(path)) != same_target[0].target:
        return run.suggest("hmc", **given, name=f"hmc-{(bases or [same_target[0].name])[0]}")
    if options.posterior:  # there, and not among those named
        return run.suggest("diagnose", posterior=[*options.posterior, "hmc"])
    return run.suggest("hmc", **given, force=True)  # there, and skipped as stale


def _find_exact_draws(same_target: list[PosteriorFacts]) -> PosteriorFacts | None:
    """Return draws of an exact sampler. Draws by stochastic gradients stay biased, so hmc is suggested beside them."""
    return next((judged for judged in same_target if judged.type == "samples" and judged.is_exact), None)


def _prior_of_draws(same_target: list[PosteriorFacts]) -> dict[str, Any]:
    """Return hmc's option for the prior of existing draws; empty without draws, or for priors that no option states."""
    drawn = next((judged for judged in same_target if judged.type == "samples"), None)
    if drawn is None or drawn.target is None or not drawn.target.is_isotropic or drawn.target.mean is not None:
        return {}
    return {"prior_precision": drawn.target.weight_precision}


def _double_draws(name: str, header: Header, *, usual: str = "hmc") -> dict[str, Any]:
    """Return hmc's options for twice as many draws, in place of these, or beside them where several runs were merged."""
    params = header.provenance.get("params", {})
    if header.meta.get("method") == "merge":
        return {"name": f"{name}-longer", "warmup": 2 * HmcOptions.warmup, "draws": 2 * header.meta["metrics"]["draws"]}
    twice = {key: 2 * int(params[key]) for key in ("warmup", "draws") if params.get(key)}
    return {**twice, "name": None if name == usual else name, "force": True}


def _build_predict_command(run: Run, chosen: RecommendedPredictor, headers: dict[str, Header]) -> str:
    """Return the command that predicts with the recommendation, that fits its temperature first, or the next step if predictions exist."""
    following = suggest_next_command(run, f"{chosen.posterior}.{chosen.integrator}")
    if following is not None:
        return following
    if chosen.by == "auto":
        return run.suggest("predict")
    if chosen.posterior not in {path.stem for path in run.folder.posteriors()}:
        return run.suggest("fit-temperature")
    header = headers.get(chosen.posterior)
    is_of_layers = header is not None and header.meta.get("layers") is not None
    return run.suggest("predict", posterior=chosen.posterior, integrator=chosen.integrator, trust_code=is_of_layers)


def compare_layers(diagnoses: list[Diagnosis]) -> list[LayerGain]:
    """Compare each posterior over other layers with the last layer's by the same method, else with the first that is not a point.

    The choice does not depend on how well it predicts.
    """
    scored = [one for one in diagnoses if one.losses is not None and one.judged.type not in POINTS]
    last = [one for one in scored if one.judged.layers is None]
    losses, counterparts = {}, {}
    for one in scored:
        if one.judged.layers is None or not last:
            continue
        same = [other for other in last if other.entry["method"] == one.entry["method"]]
        chosen = (same or last)[0]
        assert one.losses is not None
        assert chosen.losses is not None
        losses[one.judged.name] = one.losses
        counterparts[one.judged.name] = chosen.judged.name, chosen.losses
    groups = next((one.scored.groups for one in scored if one.scored is not None), None)
    return layer_gains(losses, counterparts, groups=groups)


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    target = verdict.target
    return {
        "sentence": verdict.sentence,
        "use": verdict.use,
        "prior_precision": None if target is None else target.weight_precision,
        "bias_precision": None if target is None or target.is_isotropic else target.bias_precision,
        "is_good": verdict.is_good,
        "run": verdict.run,
    }


def _build_failure(verdict: Verdict) -> CheckFailed:
    return CheckFailed(
        "--strict: none of the judged posteriors matches its target closely", hint=verdict.run, code="no_good_posterior"
    )
