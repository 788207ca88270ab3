"""Rows of the report: one job each, ours and theirs, and the table that people read."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def row_of(job: str, variant: str, seconds: float, floor: float) -> Row:
    return {"job": job, "variant": variant, "ours_seconds": seconds, "floor_seconds": floor,
            "theirs": None, "their_seconds": None, "ratio": None}  # fmt: skip


def against(row: Row, seconds: float, theirs: str) -> Row:
    return {**row, "theirs": theirs, "their_seconds": seconds, "ratio": seconds / row["ours_seconds"]}


def table(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    sizes, rates, machine_ = report["problem"], report["rates"], report["machine"]
    lines = [
        f"N {sizes['N']}, D {sizes['D']}, K {sizes['K']}, P {sizes['P']}, prior precision {sizes['prior_precision']:g}; "
        f"{machine_['gpu'] or machine_['platform']}, {machine_['threads']} threads, torch {machine_['packages']['torch']}",
        f"device: {rates['flops32'] / 1e9:.0f} GFLOP/s float32, {rates['flops64'] / 1e9:.0f} float64, "
        f"{rates['bytes'] / 1e9:.1f} GB/s copied, {rates['exponentials'] / 1e9:.2f} G exponentials/s; laplace-torch: {report['laplace_torch']}",
        "",
        f"{'job':<22}{'variant':<28}{'ours s':>10}{'theirs s':>10}{'ratio':>9}{'goal':>8}{'floor s':>10}{'x floor':>9}  theirs",
    ]
    for row in report["rows"]:
        their = "-" if row["their_seconds"] is None else f"{row['their_seconds']:.3g}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.1f}"
        goal = "-" if row["goal"] is None else str(row["goal"])
        lines.append(
            f"{row['job']:<22}{row['variant']:<28}{row['ours_seconds']:>10.3g}{their:>10}{ratio:>9}{goal:>8}"
            f"{row['floor_seconds']:>10.3g}{row['times_floor']:>9.1f}  {row['theirs'] or '-'}"
        )
    for row in report["rows"]:
        if "elbo_at_mode" in row:
            lines += ["", f"ELBO in nats: base {row['elbo_of_base']:.1f}, Pyro {row['their_elbo']:.1f}, ours with equal steps "
                      f"{row['elbo']:.1f}; Gaussian at the mode {row['elbo_at_mode']:.1f} in {row['mode_seconds']:.2f} s"]  # fmt: skip
        if "ours_ess" in row:
            lines.append(
                f"{row['theirs']}: ESS {row['their_ess']:.1f} in {row['their_total_seconds']:.1f} s; ours {row['ours_ess']:.0f} "
                f"in {row['ours_total_seconds']:.1f} s; ratio without their warm-up {row['ratio_without_their_warmup']:.1f}, "
                f"if all their draws were independent {row['ratio_if_all_draws_counted']:.1f}"
            )
    return lines
