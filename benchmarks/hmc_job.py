"""hmc against Pyro's NUTS: effective draws a second, bulk, of the parameter that mixes worst (Vehtari et al. 2021, arXiv:1903.08008)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import machine
import theirs
import torch
from machine import Rates
from problem import Problem, fit_laplace
from report import Row, against, row_of
from torch.nn.functional import cross_entropy

from bnncli.commands.hmc import HmcOptions
from bnncli.errors import NumericError
from bnncli.evaluation.convergence import Convergence, convergence
from bnncli.inference import structure_choice
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import LaplaceFit
from bnncli.inference.nuts import sample_nuts
from bnncli.numerics.random import stream
from bnncli.system.memory import budget

STEPS_A_TRANSITION = 63  # of NUTS, to plan its warm-up with; it takes what it takes


def measure_hmc(problem: Problem, rates: Rates, arguments: argparse.Namespace) -> list[Row]:
    """Worst-parameter bulk effective draws a second, warm-up and mode in the time; `seconds` are those of one such draw."""
    device, layout, options = problem.features.device, problem.layout, HmcOptions()
    structure = structure_choice.automatic_structure(layout, budget(device), device=device)
    repeats = 1 if arguments.quick else 2
    plan = (8, 10, 20) if arguments.quick else (options.chains, options.warmup, options.draws)

    def sample() -> tuple[LaplaceFit, Any]:
        fit = fit_laplace(problem, structure, "mode")
        drawn = sample_hmc(
            problem.target(), mode=fit.gaussian.mean, covariance=fit.gaussian.covariance,
            num_chains=plan[0], num_warmup=plan[1], num_draws=plan[2], target_accept=options.target_accept,
            dynamics=options.dynamics, generator=stream(0, "bench/hmc"),
        )  # fmt: skip
        return fit, drawn

    seconds, (fit, drawn) = machine.best_of(sample, device, repeats=repeats)
    judged = convergence(drawn.draws.cpu().numpy())
    ours = _ess(judged)
    steps = float(drawn.n_steps.double().mean()) * (plan[1] + plan[2])
    work = machine.gradient_work(len(problem.features), layout, draws=plan[0])
    roots = machine.root_product_work(structure, layout, draws=2 * plan[0], is_double=True)
    work = work.plus(roots).times(steps).plus(machine.curvature_work(structure, len(problem.features), layout))
    rows = []
    for name, (draws, their_seconds, facts) in _nuts_runs(problem, fit, arguments).items():
        their_ess = _ess(convergence(draws.numpy()))
        row = row_of("hmc" if "ordinary" in name else "hmc, same target", "seconds an effective draw", seconds / ours,
                   work.seconds(rates) / ours)  # fmt: skip
        row = against(row, their_seconds / their_ess, name)
        # An effective size from a dozen draws is a rough one: what if each of them were independent?
        ratios = {
            "ratio_if_all_draws_counted": their_seconds / draws.shape[1] / (seconds / ours),
            "ratio_without_their_warmup": facts["draw_seconds"] / their_ess / (seconds / ours),
        }
        row |= {"ours_ess": ours, "ours_total_seconds": seconds, "r_hat": judged.r_hat, "their_ess": their_ess}
        rows.append({**row, "their_total_seconds": their_seconds, **facts, **ratios})
    return rows


def _nuts_runs(problem: Problem, fit: LaplaceFit, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of NUTS: draws (1, T, P), seconds, facts."""
    device = problem.features.device
    theta = problem.head.float().requires_grad_()

    def gradient() -> torch.Tensor:
        weight, bias = problem.layout.split(theta)
        logits = problem.features @ weight.T if bias is None else problem.features @ weight.T + bias
        return torch.autograd.grad(cross_entropy(logits, problem.labels, reduction="sum"), theta)[0]

    one = machine.best_of(gradient, device)[0]
    warmup = min(300, max(10, round(0.4 * arguments.seconds_nuts / (one * STEPS_A_TRANSITION))))
    ordinary = theirs.sample_by_nuts(
        problem, num_warmup=warmup, max_seconds=arguments.seconds_nuts, max_draws=2000, seed=0
    )
    total = ordinary.warmup_seconds + ordinary.draw_seconds
    runs: dict[str, Any] = {
        f"Pyro NUTS, ordinary model, {warmup} + {ordinary.draws.shape[1]} draws": (
            ordinary.draws, total,
            {"draw_seconds": ordinary.draw_seconds, "their_gradients": ordinary.num_gradients, "gradient_seconds": one},
        )
    }  # fmt: skip
    warmup, draws = (5, 8) if arguments.quick else (30, 100)
    gaussian = fit.gaussian
    run: Callable[[], Any] = lambda: sample_nuts(  # noqa: E731
        problem.target(), mode=gaussian.mean, covariance=gaussian.covariance, seed=0,
        num_chains=1, num_warmup=warmup, num_draws=draws,
    )  # fmt: skip
    seconds, drawn = machine.timed(run, device)
    share = draws / (warmup + draws)
    runs[f"Pyro NUTS, our whitened target, {warmup} + {draws} draws"] = (
        drawn.draws.cpu(), seconds, {"draw_seconds": share * seconds},
    )  # fmt: skip
    return runs


def _ess(judged: Convergence) -> float:
    if judged.ess_bulk is None:
        raise NumericError(f"no effective sample size: {judged.undefined}", hint="give --seconds-nuts more time")
    return float(judged.ess_bulk)
