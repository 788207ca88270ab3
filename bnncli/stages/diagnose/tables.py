"""The tables that diagnose prints: Gaussians, flows and points; chains; distances between all pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.posteriors import LATENT_BINARY
from bnncli.session.run import Table

MAX_PAIRS = 15
_DENSITY_NOTE = "+- standard error; sd log w, k: spread and Pareto k of the log weights"
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
    """Tables of at most about 100 columns; an undefined number is a dash, +- is one standard error."""
    densities = {name: entry for name, entry in entries.items() if entry["type"] != "samples"}
    chains = {name: entry for name, entry in entries.items() if entry["type"] == "samples"}
    tables = []
    if densities:
        tables.append(
            Table(
                _DENSITY_COLUMNS,
                [_density_row(name, entry) for name, entry in densities.items()],
                notes=[_density_note(densities)],
                narrow=[_turned(_DENSITY_COLUMNS, [_density_row(*item) for item in densities.items()])],
            )
        )
    if chains:
        rows = [_chain_row(name, entry) for name, entry in chains.items()]
        notes = ["worst parameter or chain; div.: divergences; accepts: acceptance rate" + _TUNED * _any_tuned(chains)]
        tables.append(Table(_CHAIN_COLUMNS, rows, notes=notes, narrow=[_turned(_CHAIN_COLUMNS, rows)]))
    if pairs:
        tables.append(_pair_table(pairs))
    return tables


def _density_row(name: str, entry: dict[str, Any]) -> list[str]:
    return [
        name,
        _prior(entry),
        _number(entry["elbo"], 2),
        _number(entry["log_weight_sd"], 2),
        _number(entry["pareto_k"], 2),
        _number(entry["log_evidence"], 2),
        _val_nll(entry),
        _good(entry),
    ]


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
        _prior(entry),
        *(_number(entry[key], digits) for key, digits in keys),
        _val_nll(entry),
        _good(entry),
    ]


def _pair_table(pairs: list[dict[str, Any]]) -> Table:
    """The distances; only those to the first sample posterior where all pairs would be too many to read."""
    rows = []
    reference = next((pair["bandwidth_of"] for pair in pairs if pair.get("bandwidth_of")), None)
    few = [pair for pair in pairs if reference in pair["posteriors"]]
    shown = pairs if len(pairs) <= MAX_PAIRS or not few else few
    for pair in shown:
        distance = {"value": pair["unbiased"], "standard_error": pair.get("standard_error")}
        values = [_number(distance, 4), _number({"value": pair["biased"]}, 4), _number({"value": pair["p_value"]}, 3)]
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


def _turned(columns: list[str], rows: list[list[str]]) -> Table:
    """The same numbers for a narrow terminal: a row for each number, a column for each posterior."""
    turned = [[name, *(row[i] for row in rows)] for i, name in enumerate(columns) if i > 0]
    return Table([columns[0], *(row[0] for row in rows)], turned)


def _density_note(densities: Mapping[str, dict[str, Any]]) -> str:
    latent = [name for name, entry in densities.items() if entry["type"] == LATENT_BINARY]
    note = _DENSITY_NOTE
    if not any(entry["draws"] for entry in densities.values()):
        note = "+- standard error; none has a density, so only their predictions can be compared"
    other = f"; {', '.join(latent)}: has a spike-and-slab prior, and so another target" if latent else ""
    return note + _TUNED * _any_tuned(densities) + other


def _any_tuned(entries: Mapping[str, dict[str, Any]]) -> bool:
    return any(entry["val_nll"].get("tuned_on_val") for entry in entries.values())


def _prior(entry: dict[str, Any]) -> str:
    """The precision of the weights, that of the biases where it is another, and how much of the checkpoint the mean is."""
    value, bias, scale = (entry[name] for name in ("prior_precision", "bias_precision", "prior_mean_scale"))
    if value is None:
        return "-"
    shown = f"{value:.4g}" if bias is None else f"{value:.4g} / {bias:.4g}"
    return shown if scale is None else f"{shown} (mean {scale:.3g})"


def _val_nll(entry: dict[str, Any]) -> str:
    return _number(entry["val_nll"], 4) + "*" * bool(entry["val_nll"].get("tuned_on_val"))


def _good(entry: dict[str, Any]) -> str:
    return "-" if entry["is_good"] is None else "yes" if entry["is_good"] else "no"


def _number(part: dict[str, Any], digits: int) -> str:
    """A number with its standard error, or a dash."""
    if part["value"] is None:
        return "-"
    error = part.get("standard_error")
    shown = f"{round(part['value'], digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero
    return shown if error is None else f"{shown} +- {error:.{digits}f}"
