"""refine against Pyro's SVI: the time to the ELBO that SVI ends at, and, for the record, the time of equal steps.

The base is the Gaussian at the checkpoint's weights, where the published refinement has something to do (Kristiadi,
Eschenhagen and Hennig 2022, arXiv:2205.10041). Plans were found on a LeNet-5 head (Fashion-MNIST, N = 60,000, P = 850).
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import machine
import theirs
import torch
from machine import Rates, Work
from problem import Problem, fit_laplace
from report import Row, against, row_of

from bnncli.inference.elbo import elbo, measure_gain
from bnncli.inference.refine import RefineFit, fit_flow
from bnncli.numerics.random import stream
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.system.devices import single_threaded


class RefinePlan(NamedTuple):
    """A flow and how it is trained, but for the number of epochs."""

    flow: str
    space: str
    length: int
    batch_size: int
    learning_rate: float
    num_draws: int


PUBLISHED = RefinePlan("radial", "weight", 5, 128, 1e-3, 1)
PUBLISHED_EPOCHS = 20
# Radial layers act where the published ones do; affine ones in coordinates whitened by the base.
PLANS = (
    RefinePlan("radial", "weight", 5, 1024, 0.02, 1),
    RefinePlan("radial", "weight", 5, 512, 0.01, 1),
    RefinePlan("radial", "weight", 5, 2048, 0.03, 1),
    RefinePlan("radial", "weight", 5, 8192, 0.03, 4),
    RefinePlan("affine", "whitened", 1, 2048, 0.1, 2),
    RefinePlan("affine", "whitened", 1, 1024, 0.1, 1),
    RefinePlan("affine", "whitened", 1, 8192, 0.1, 8),
)


def measure_refine(problem: Problem, base: Gaussian, rates: Rates, arguments: argparse.Namespace) -> list[Row]:
    """Time to the ELBO that Pyro's SVI ends at, by the best of our plans for each flow; and the time of equal steps."""
    target, device, count = problem.target(), problem.features.device, len(problem.features)
    epochs = 1 if arguments.quick else PUBLISHED_EPOCHS
    steps = epochs * -(-count // PUBLISHED.batch_size)
    chosen = _svi(problem, base, steps, quick=arguments.quick)
    draws = 32 if arguments.quick else 256

    def value(posterior: Gaussian | Flow) -> float:
        return elbo(target, posterior, generator=stream(0, "bench/elbo"), num_samples=draws).value

    bar = value(chosen.posterior)
    name = f"Pyro SVI, {steps} steps of {PUBLISHED.batch_size}"
    seconds, fit = machine.timed(lambda: _refine(problem, base, PUBLISHED, epochs), device)
    floor = _refine_work(problem, PUBLISHED, epochs).seconds(rates)
    equal = against(row_of("refine, equal steps", PUBLISHED.flow, seconds, floor), chosen.seconds, name)
    equal |= {"goal": None, "elbo": value(fit.posterior), "their_elbo": bar}
    rows = [equal]
    for flow in dict.fromkeys(plan.flow for plan in PLANS):
        found = time_to_elbo(
            problem, base, chosen.posterior, flow, limit=chosen.seconds * (20 if arguments.quick else 1)
        )
        if found is None:
            print(f"engine.py: no {flow} plan came to Pyro's ELBO in Pyro's time", file=sys.stderr)
            continue
        plan, epochs, seconds, posterior = found
        floor = _refine_work(problem, plan, epochs).seconds(rates)
        row = against(row_of("refine", f"{plan.flow} to equal ELBO", seconds, floor), chosen.seconds, name)
        rows.append(row | {"elbo": value(posterior), "their_elbo": bar, "plan": {**plan._asdict(), "epochs": epochs}})
    # For the record: with this target, most of what refinement repairs is that the base is not at the mode.
    mode_seconds, at_mode = machine.best_of(lambda: fit_laplace(problem, "full", "mode"), device)
    rows[0] |= {"elbo_of_base": value(base), "elbo_at_mode": value(at_mode.gaussian), "mode_seconds": mode_seconds}
    return rows


def _svi(problem: Problem, base: Gaussian, num_steps: int, *, quick: bool) -> theirs.SviRun:
    """Pyro's run, on one thread or on all: whichever is faster for the first steps."""

    def run(steps: int) -> theirs.SviRun:
        return theirs.refine_by_svi(
            problem, base, length=PUBLISHED.length, batch_size=PUBLISHED.batch_size, num_steps=steps,
            learning_rate=PUBLISHED.learning_rate, seed=0,
        )  # fmt: skip

    run(10)
    if problem.features.device.type == "cuda" or torch.get_num_threads() == 1:
        return run(num_steps)
    probe = 20 if quick else 150
    with single_threaded():
        alone = run(probe).seconds
    if run(probe).seconds <= alone:
        return run(num_steps)
    with single_threaded():
        return run(num_steps)


def _refine(problem: Problem, base: Gaussian, plan: RefinePlan, epochs: int) -> RefineFit:
    """Ours, by one plan."""
    return fit_flow(
        problem.target(), base, flow=plan.flow, space=plan.space, length=plan.length, epochs=epochs,
        batch_size=plan.batch_size, learning_rate=plan.learning_rate, num_draws=plan.num_draws,
        generator=stream(0, "bench/refine"),
    )  # fmt: skip


def time_to_elbo(
    problem: Problem, base: Gaussian, bar: Flow, flow: str, *, limit: float
) -> tuple[RefinePlan, int, float, Flow] | None:
    """The plan of this flow that is soonest at the bar's ELBO, its epochs, seconds and posterior; None when none is.

    Whole plans of growing length, each with its learning rate down to zero; the ELBO, outside the clock, on all data and the
    draws that the bar's is measured with.
    """
    target, device = problem.target(), problem.features.device
    best: tuple[RefinePlan, int, float, Flow] | None = None
    for plan in (plan for plan in PLANS if plan.flow == flow):
        epochs, seconds = 1, 0.0
        if device.type == "cuda":
            _refine(problem, base, plan, 1)
        while seconds < (best[2] if best else limit):
            run = lambda plan=plan, epochs=epochs: _refine(problem, base, plan, epochs)  # noqa: E731
            seconds, fit = machine.timed(run, device)
            gain = measure_gain(target, bar, fit.posterior, generator=stream(0, "bench/elbo"), num_samples=256).value
            if gain >= 0:
                seconds = min(seconds, machine.best_of(run, device, repeats=2)[0])
                if best is None or seconds < best[2]:
                    best = plan, epochs, seconds, fit.posterior
                break
            epochs = max(epochs + 1, round(1.3 * epochs))
    return best


def _refine_work(problem: Problem, plan: RefinePlan, epochs: int) -> Work:
    """Of all steps: gradients over the batches, and draws of the base."""
    count, layout = len(problem.features), problem.layout
    gradients = machine.gradient_work(count, layout, draws=plan.num_draws).times(epochs)
    base = machine.root_product_work("full", layout, draws=plan.num_draws, is_double=False)
    backward = 2 if plan.space == "whitened" else 1  # there the gradient goes back through the root
    return gradients.plus(base.times(backward * epochs * -(-count // min(plan.batch_size, count))))
