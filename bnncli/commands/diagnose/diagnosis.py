"""Diagnose one posterior: its draws, its losses on val, and the tables that diagnose prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.samples import SampleFile
from bnncli.errors import DataError
from bnncli.evaluation.convergence import convergence, deciding_numbers
from bnncli.evaluation.distances import ThinnedDraws, num_draws_to_compare, thin_draws
from bnncli.evaluation.recommendation import ScoredPredictive, independent_values, score_predictive
from bnncli.evaluation.verdict import DENSITIES, LINEAR_DRAWS, POINTS, PosteriorFacts, lowest_bfmi, reasons_against
from bnncli.inference.elbo import FIRST_DRAWS, FIRST_NETWORK_DRAWS, diagnose_importance, network_draws
from bnncli.integrators import load_integrator
from bnncli.parameters.module import ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors import LATENT_BINARY, draw
from bnncli.session.inputs import Split, open_posterior, open_samples, read_recorded_prior, require_draws
from bnncli.session.out_of_fold import OutOfFold, read_fitted_splits
from bnncli.session.predictor import TrainData, sampling_integrator
from bnncli.session.run import Run, Table
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.commands.diagnose import DiagnoseOptions


@dataclass(frozen=True)
class Diagnosis:
    """Findings about one posterior.

    Args:
        judged: numbers behind the verdict.
        entry: numbers of --json, null with a reason where undefined.
        draws: on the CPU, as many as num_compared says, with what is independent among them.
        scored: scores on val; None without labelled val.
        predicted_by: the integrator that gave them, and of how many draws; None where it makes none.
    """

    judged: PosteriorFacts
    entry: dict[str, Any]
    draws: ThinnedDraws
    scored: ScoredPredictive | None
    predicted_by: tuple[str, int | None] | None = None

    @property
    def losses(self) -> NDArray[np.float64] | None:
        """Return the negative log probability of each val label, (N,), in nats; None without labelled val."""
        return None if self.scored is None else self.scored.losses


def diagnose(
    run: Run,
    options: DiagnoseOptions,
    path: Path,
    *,
    name: str,
    train: CurvedTarget,
    val: Split | None,
    data: TrainData,
    network: ModuleNetwork | None = None,
) -> Diagnosis:
    """Diagnose the posterior in a file, reported as `name`.

    Args:
        train: log posterior of the rows that the posterior was fitted to; its own prior is ignored.
        val: as the posterior sees it, like train.
        data: provides the folds of a posterior that was fitted to val.
        network: network of a posterior over other layers than the last.

    Raises:
        DataError: the file is damaged, or the posterior is over another head.
    """
    content: SampleFile | None = None
    if path.suffix == ".nc":
        require_draws(run, read_header(path))
        posterior, content = open_samples(path)
        assert content.header is not None
        header: Header = content.header
    else:
        posterior, header = open_posterior(path)
    if network is not None:
        posterior = posterior.bound_to(network)
    if posterior.layout != train.layout:
        raise DataError(
            f"{path} takes {posterior.layout}, but the features have {train.layout}", code="wrong_layout", path=path
        )
    entry = _empty_entry(posterior.type, header)
    if content is not None:
        entry |= _diagnose_chains(run, posterior.draws, content)
    elif "num_varying" in header.meta:
        reason = f"all but {header.meta['num_varying']:,} parameters are fixed, so it has no density over all of them"
        entry |= dict.fromkeys(("elbo", "log_weight_sd", "pareto_k", "log_evidence"), make_undefined(reason))
    elif posterior.type in DENSITIES:
        entry |= _measure_importance(run, options, name, posterior, header, train)
    scored = _score_val(run, name, posterior, header, val, data)
    entry["val_nll"] = _average_losses(None if scored is None else independent_values(scored.losses, scored.groups))
    draws = _draws(run, name, posterior, {**entry, **_read_effective_size(header)})
    known: dict[str, Any] = {"layers": header.meta.get("layers"), "num_varying": header.meta.get("num_varying")}
    known["fit_on"] = read_fitted_splits(header)
    known["is_exact"] = header.meta.get("metrics", {}).get("is_exact", True)
    left = header.meta.get("metrics", {}).get("shortfall") or {}
    known["shortfall"] = left["value"] if left.get("is_large") else None
    judged = replace(_collect_facts(name, entry, read_recorded_prior(header)), **known)
    if posterior.type in DENSITIES or posterior.type == "samples":
        entry["doubts"] = reasons_against(judged)
        entry["is_good"] = not entry["doubts"]
    by = None if val is None or scored is None else _choose_integrator(posterior, header, val)
    return Diagnosis(judged, entry, draws, scored, by)


def _empty_entry(kind: str, header: Header) -> dict[str, Any]:
    """Return an entry with every key, undefined for the reason that holds for the posterior's type."""
    no_density = "draws have no density" if kind in ("samples", LINEAR_DRAWS) else f"a {kind} has no density"
    no_chains = f"a {kind} posterior has no chains"
    prior = read_recorded_prior(header)
    entry: dict[str, Any] = {
        "type": kind,
        "method": header.meta.get("method"),
        "prior_precision": prior.weight_precision if prior else None,
        "bias_precision": None if prior is None or prior.is_isotropic else prior.bias_precision,
        "prior_mean_scale": prior.mean_scale if prior else None,
        "is_good": None,
        "doubts": [],
        "draws": None,
    }
    for key in ("elbo", "log_weight_sd", "pareto_k", "log_evidence"):
        entry[key] = make_undefined(no_density)
    for key in ("r_hat", "ess_bulk", "ess_tail", "bfmi", "divergences", "lowest_chain_acceptance"):
        entry[key] = make_undefined(no_chains)
    return entry


def _diagnose_chains(run: Run, draws: Tensor, content: SampleFile) -> dict[str, Any]:
    """Return convergence as hmc recorded it, or computed, with energies, divergences and acceptance."""
    assert content.header is not None
    metrics = content.header.meta.get("metrics", {})
    if all(name in metrics for name in ("max_rhat", "min_ess_bulk", "min_ess_tail")):
        worst = deciding_numbers(metrics)
    else:
        worst = convergence(draws.numpy(), device=run.device, progress=run.console)
    values = {"r_hat": worst.r_hat, "ess_bulk": worst.ess_bulk, "ess_tail": worst.ess_tail}
    found: dict[str, Any] = {key: _value(value, worst.undefined) for key, value in values.items()}
    stats = content.stats
    not_told = make_undefined("the sampler does not record it")
    energy, diverging, acceptance = (stats.get(name) for name in ("energy", "diverging", "acceptance_rate"))
    if energy is None or energy.shape[1] < 2:
        found["bfmi"] = not_told if energy is None else make_undefined("needs at least two draws per chain")
    else:
        found["bfmi"] = {"value": lowest_bfmi(energy)}
    found["divergences"] = not_told if diverging is None else {"value": int(diverging.astype(bool).sum())}
    found["lowest_chain_acceptance"] = (
        not_told if acceptance is None else {"value": float(acceptance.astype(np.float64).mean(axis=1).min())}
    )
    return {"draws": draws.shape[0] * draws.shape[1], **found}


def _measure_importance(
    run: Run, options: DiagnoseOptions, name: str, posterior: Any, header: Header, train: CurvedTarget
) -> dict[str, Any]:
    """Return ELBO, log-weight spread, Pareto k and evidence on the posterior's own target."""
    prior = read_recorded_prior(header)
    if prior is None:
        no_target = make_undefined("its artifact has no prior precision, so it has no target")
        return dict.fromkeys(("elbo", "log_weight_sd", "pareto_k", "log_evidence"), no_target)
    found = diagnose_importance(
        train.with_prior(prior),
        posterior.to(run.device),
        generator=run.stream(f"diagnose/elbo/{name}"),
        num_draws=options.draws,
        **_choose_draws(header, train.num_examples, posterior.layout.widest),
        progress=run.console,
    )
    reason, no_evidence = found.undefined, found.evidence_undefined
    threshold = {"threshold": found.k_threshold}
    evidence = _value(found.log_evidence, no_evidence, standard_error=found.log_evidence_error)
    own = header.meta.get("metrics", {}).get("log_marginal_likelihood")
    if header.meta.get("center") == "mode" and own is not None:
        evidence["laplace"] = own
    return {
        "draws": found.num_draws,
        "elbo": _value(found.elbo, reason, standard_error=found.elbo_error),
        "log_weight_sd": _value(found.log_weight_sd, reason),
        "pareto_k": _value(found.pareto_k, reason) | threshold,
        "log_evidence": evidence,
    }


def _choose_draws(header: Header, num_examples: int, widest: int) -> dict[str, int]:
    """Return the first number of draws and the largest, where --draws is not given."""
    if header.meta.get("layers") is None:
        return {"first_draws": FIRST_DRAWS, "enough_draws": FIRST_DRAWS}
    enough = network_draws(num_examples, widest)
    return {"first_draws": FIRST_NETWORK_DRAWS, "enough_draws": enough}


def _value(value: float | None, reason: str | None, **others: float | None) -> dict[str, Any]:
    """Return a value with its details, or null with the reason."""
    return make_undefined(reason or "undefined") if value is None else {"value": value, **others}


def _score_val(
    run: Run, key: str, posterior: Any, header: Header, val: Split | None, data: TrainData
) -> ScoredPredictive | None:
    """Score on val, with 200 draws, or all draws of samples, or plug-in for a point.

    A posterior over other layers predicts by its default integrator, a Gaussian with the linearised network. One that was fitted to val
    predicts val by its folds, or has no scores.
    """
    if val is None or val.content.labels is None:
        return None
    name, size = _choose_integrator(posterior, header, val)
    judged = data.judged_on(header, posterior.to(run.device), val)
    if judged is None:
        return None

    def predicted(one: Any, features: Tensor) -> NDArray[np.float32]:
        generator = run.stream("diagnose/val")
        found = load_integrator(name).predict(
            one, features, num_samples=size, generator=generator, progress=run.console
        )
        probs: NDArray[np.float32] = found.probs.cpu().numpy()
        return probs

    features = val.features(run.device)
    if not isinstance(judged, OutOfFold):
        return score_predictive(key, predicted(judged, features), val.content.labels, groups=val.groups)
    probs = np.empty((len(features), posterior.layout.num_classes), dtype=np.float32)
    for one, rows in judged.parts():
        probs[rows.numpy()] = predicted(one, features[rows.to(features.device)])
    return score_predictive(key, probs, val.content.labels, groups=val.groups)


def _average_losses(losses: NDArray[np.float64] | None) -> dict[str, Any]:
    """Return the mean of independent losses (n,) and its standard error."""
    if losses is None:
        return make_undefined("no labelled val split")
    error = float(losses.std(ddof=1) / len(losses) ** 0.5) if len(losses) > 1 else None
    return {"value": float(losses.mean()), "standard_error": error}


def make_undefined(reason: str) -> dict[str, Any]:
    """Return an undefined value with its reason."""
    return {"value": None, "reason": reason}


def _draws(run: Run, name: str, posterior: Any, entry: dict[str, Any]) -> ThinnedDraws:
    """Return draws for MMD^2, at most 600 and fewer if long, from their own random stream, or thinned from chains."""
    count = num_draws_to_compare(posterior.layout.num_params)
    if posterior.type != "samples":
        # The test takes both sides for independent: posteriors must not share their noise.
        size = count if posterior.type == "stack" else getattr(posterior, "num_stored", count)
        return ThinnedDraws(draw(posterior, min(size, count), run.stream(f"diagnose/mmd/{name}")).cpu())
    sizes = [entry[key]["value"] for key in ("ess_bulk", "ess_tail")]
    independent = min((int(size) for size in sizes if size is not None), default=0)
    return thin_draws(posterior.draws, independent, count=count)


def _read_effective_size(header: Header) -> dict[str, Any]:
    """Return the recorded effective sample size of the parameters, which distances use."""
    names = {"ess_bulk": "min_ess_bulk", "ess_tail": "min_ess_tail"}
    metrics = header.meta.get("metrics", {})
    return {key: {"value": metrics[name]} for key, name in names.items() if name in metrics}


def _collect_facts(name: str, entry: dict[str, Any], target: Prior | None) -> PosteriorFacts:
    """Return the numbers of an entry that decide the verdict."""
    value = {key: part["value"] for key, part in entry.items() if isinstance(part, dict)}
    return PosteriorFacts(
        name=name,
        type=entry["type"],
        target=target,
        elbo=value["elbo"],
        elbo_error=entry["elbo"].get("standard_error"),
        log_weight_sd=value["log_weight_sd"],
        pareto_k=value["pareto_k"],
        k_threshold=entry["pareto_k"].get("threshold", 0.7),
        r_hat=value["r_hat"],
        ess_bulk=value["ess_bulk"],
        ess_tail=value["ess_tail"],
        divergences=value["divergences"],
        lowest_acceptance=value["lowest_chain_acceptance"],
        lowest_bfmi=value["bfmi"],
    )


VAL_DRAWS = 200


def _choose_integrator(posterior: Any, header: Header, val: Split) -> tuple[str, int | None]:
    """Return the integrator that predicts val and its draws; None where it makes no draws."""
    name = "plug-in" if posterior.type in POINTS else "mc" if val.is_last_layer else sampling_integrator(header)
    return name, None if posterior.type in (*POINTS, "samples", LINEAR_DRAWS) else VAL_DRAWS


_TUNED = "; * tuned on val"
_DENSITY_COLUMNS = ["posterior", "prior", "ELBO", "sd log w", "k", "log evidence", "val NLL", "good"]
_CHAIN_COLUMNS = [
    "posterior",
    "prior",
    "R-hat",
    "ESS bulk",
    "ESS tail",
    "E-BFMI",
    "div.",
    "accepts",
    "val NLL",
    "good",
]


def diagnosis_tables(entries: Mapping[str, dict[str, Any]], pairs: list[dict[str, Any]]) -> list[Table]:
    """Return tables of at most about 100 columns. A dash is an undefined number, +- one standard error."""
    densities = {name: entry for name, entry in entries.items() if entry["type"] != "samples"}
    chains = {name: entry for name, entry in entries.items() if entry["type"] == "samples"}
    tables = []
    if densities:
        tables.append(
            Table(
                _DENSITY_COLUMNS,
                [_density_row(name, entry) for name, entry in densities.items()],
                notes=[_density_note(densities)],
                narrow=[_transpose(_DENSITY_COLUMNS, [_density_row(*item) for item in densities.items()])],
            )
        )
    if chains:
        rows = [_chain_row(name, entry) for name, entry in chains.items()]
        notes = ["worst parameter or chain; div.: divergences; accepts: acceptance rate" + _TUNED * _has_tuned(chains)]
        tables.append(Table(_CHAIN_COLUMNS, rows, notes=notes, narrow=[_transpose(_CHAIN_COLUMNS, rows)]))
    if pairs:
        tables.append(_pair_table(pairs))
    return tables


def _density_row(name: str, entry: dict[str, Any]) -> list[str]:
    return [
        name,
        _describe_prior(entry),
        _format_number(entry["elbo"], 2),
        _format_number(entry["log_weight_sd"], 2),
        _format_number(entry["pareto_k"], 2),
        _format_number(entry["log_evidence"], 2),
        _format_val_nll(entry),
        _format_good(entry),
    ]


_DENSITY_NOTE = "+- standard error; sd log w, k: spread and Pareto k of the log weights"


def _density_note(densities: Mapping[str, dict[str, Any]]) -> str:
    latent = [name for name, entry in densities.items() if entry["type"] == LATENT_BINARY]
    note = _DENSITY_NOTE
    if not any(entry["draws"] for entry in densities.values()):
        note = "+- standard error; none has a density, so only their predictions can be compared"
    other = f"; {', '.join(latent)}: has a spike-and-slab prior, and so another target" if latent else ""
    return note + _TUNED * _has_tuned(densities) + other


def _transpose(columns: list[str], rows: list[list[str]]) -> Table:
    """Transpose a table for a narrow terminal: one row per number, one column per posterior."""
    turned = [[name, *(row[i] for row in rows)] for i, name in enumerate(columns) if i > 0]
    return Table([columns[0], *(row[0] for row in rows)], turned)


def _chain_row(name: str, entry: dict[str, Any]) -> list[str]:
    keys = (
        ("r_hat", 3),
        ("ess_bulk", 0),
        ("ess_tail", 0),
        ("bfmi", 2),
        ("divergences", 0),
        ("lowest_chain_acceptance", 2),
    )
    return [
        name,
        _describe_prior(entry),
        *(_format_number(entry[key], digits) for key, digits in keys),
        _format_val_nll(entry),
        _format_good(entry),
    ]


def _describe_prior(entry: dict[str, Any]) -> str:
    """Describe a prior: precision of weights, of biases if different, and the scale of the checkpoint in its mean."""
    value, bias, scale = (entry[name] for name in ("prior_precision", "bias_precision", "prior_mean_scale"))
    if value is None:
        return "-"
    shown = f"{value:.4g}" if bias is None else f"{value:.4g} / {bias:.4g}"
    return shown if scale is None else f"{shown} (mean {scale:.3g})"


def _format_val_nll(entry: dict[str, Any]) -> str:
    return _format_number(entry["val_nll"], 4) + "*" * bool(entry["val_nll"].get("tuned_on_val"))


def _format_good(entry: dict[str, Any]) -> str:
    return "-" if entry["is_good"] is None else "yes" if entry["is_good"] else "no"


def _has_tuned(entries: Mapping[str, dict[str, Any]]) -> bool:
    return any(entry["val_nll"].get("tuned_on_val") for entry in entries.values())


MAX_PAIRS = 15


def _pair_table(pairs: list[dict[str, Any]]) -> Table:
    """Return the table of distances; only those to the first sample posterior where all pairs are too many to read."""
    rows = []
    reference = next((pair["bandwidth_of"] for pair in pairs if pair.get("bandwidth_of")), None)
    few = [pair for pair in pairs if reference in pair["posteriors"]]
    shown = pairs if len(pairs) <= MAX_PAIRS or not few else few
    for pair in shown:
        distance = {"value": pair["unbiased"], "standard_error": pair.get("standard_error")}
        values = [
            _format_number(distance, 4),
            _format_number({"value": pair["biased"]}, 4),
            _format_number({"value": pair["p_value"]}, 3),
        ]
        same = "yes" if pair["is_same_target"] else "no"
        rows.append([f"{pair['posteriors'][0]} - {pair['posteriors'][1]}", *values, same])
    notes = list(dict.fromkeys(pair["reason"] for pair in pairs if "reason" in pair))
    if len(shown) < len(pairs):
        notes.append(f"--json has {len(pairs) - len(shown)} more pairs without {reference}")
    known = next((pair for pair in pairs if pair["unbiased"] is not None), None)
    if known is not None:
        notes.insert(
            0,
            f"+- standard error; bandwidth from the draws of {known['bandwidth_of']}; p: {known['permutations']} permutations",
        )
    return Table(["pair", "MMD^2", "biased", "p", "same target"], rows, notes=["; ".join(notes)] if notes else [])


def _format_number(part: dict[str, Any], digits: int) -> str:
    """Format a number with its standard error, or a dash."""
    if part["value"] is None:
        return "-"
    error = part.get("standard_error")
    shown = f"{round(part['value'], digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero
    return shown if error is None else f"{shown} +- {error:.{digits}f}"
