"""Times on the LeNet-5 head (P = 850, 60,000 examples) and on a latent binary network of MNIST's size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from machine import Work, covariance_work, curvature_work, gradient_work, timed
from problem import Problem, fit_laplace, load_problem
from refine_job import PUBLISHED, PUBLISHED_EPOCHS, time_to_elbo
from torch import Tensor

from bnncli.evaluation.convergence import convergence
from bnncli.flows import choose_recipe
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.laplace import LaplaceFit
from bnncli.inference.prior_precision import search
from bnncli.inference.refine import RefineFit, fit_flow
from bnncli.latent.fit import Plan, fit_latent
from bnncli.numerics.seeds import stream
from bnncli.options import HmcOptions
from bnncli.stages.demo.fixtures import fixture_path
from bnncli.storage.features import read_features
from gpu_parts.commands import run_line
from gpu_parts.heads import examples, latent_model

if TYPE_CHECKING:
    from gpu_parts.speed import Clock

PRIOR_PRECISION = 510.0
EXACT_FITS, CANDIDATES = 8, 18  # of a search for the prior precision: whole decades, then halved steps
GOOD_RHAT = 1.01


@dataclass
class Lenet:
    """The head, its data and what is made of it once."""

    problem: Problem
    val: tuple[Tensor, Tensor]
    clock: Clock

    @property
    def count(self) -> int:
        """N."""
        return len(self.problem.features)

    @cached_property
    def beside(self) -> LaplaceFit:
        """The Gaussian at the checkpoint's weights, where the published refinement has something to do."""
        return fit_laplace(self.problem, "full")

    @cached_property
    def at_mode(self) -> LaplaceFit:
        """The Gaussian at the mode."""
        return fit_laplace(self.problem, "full", "mode")

    def search(self) -> None:
        """fit-laplace with the search on val: what the command does but for reading and writing."""
        layout = self.problem.layout
        work = gradient_work(self.count, layout, is_double=True).times(CANDIDATES)
        work = work.plus(
            curvature_work("full", self.count, layout).plus(covariance_work("full", layout)).times(EXACT_FITS)
        )
        held_out = self.problem.target().held_out(*self.val)
        self.clock.job(
            f"fit-laplace with search, N {self.count}", work,
            lambda: search(
                self.problem.target(), start=self.problem.head, generator=stream(0, "bench/search"),
                held_out=held_out,
            ), most=0.2,
        )  # fmt: skip

    def radial(self) -> None:
        """The published refinement, and the time in which another plan is as good."""
        epochs = 1 if self.clock.is_quick else PUBLISHED_EPOCHS
        work = gradient_work(self.count, self.problem.layout).times(epochs)

        def run() -> RefineFit:
            return fit_flow(
                self.problem.target(), self.beside.gaussian, flow=PUBLISHED.flow, space=PUBLISHED.space,
                length=PUBLISHED.length, epochs=epochs, batch_size=PUBLISHED.batch_size, num_draws=PUBLISHED.num_draws,
                learning_rate=PUBLISHED.learning_rate, generator=stream(0, "bench/refine"),
            )  # fmt: skip

        run()  # captures and libraries
        seconds, fit = timed(run, self.clock.device)
        self.clock.tell(f"refine radial, {epochs} epochs of batches of 128", seconds, work, most=5.5)
        limit = 5.0 if self.clock.is_quick else 20.0
        found = time_to_elbo(self.problem, self.beside.gaussian, fit.posterior, "radial", limit=limit)
        if found is None:
            self.clock.ledger.miss("refine radial to equal ELBO", f"no plan came to it within {limit:g} s")
            return
        plan, epochs, seconds, _ = found
        work = gradient_work(self.count, self.problem.layout, draws=plan.num_draws).times(epochs)
        name = f"refine radial to equal ELBO ({epochs} epochs of batches of {plan.batch_size})"
        self.clock.tell(name, seconds, work, most=0.5)

    def affine(self) -> None:
        """refine as it is by default, from the mode."""
        recipe = choose_recipe("affine")
        epochs = 5 if self.clock.is_quick else recipe.epochs

        def run() -> RefineFit:
            return fit_flow(
                self.problem.target(), self.at_mode.gaussian, flow="affine", epochs=epochs, patience=5,
                generator=stream(0, "bench/refine"),
            )  # fmt: skip

        run()
        seconds, fit = timed(run, self.clock.device)
        work = gradient_work(self.count, self.problem.layout, draws=recipe.num_draws).times(len(fit.history))
        self.clock.tell(f"refine affine, {len(fit.history)} epochs", seconds, work, most=0.4)

    def chains(self) -> None:
        """hmc as it is by default: the draws, whose R-hat must be good, and apart the judging of them."""
        options = HmcOptions()
        plan = (4, 5, 8) if self.clock.is_quick else (options.chains, options.warmup, options.draws)

        def run() -> HmcRun:
            gaussian = self.at_mode.gaussian
            return sample_hmc(
                self.problem.target(), mode=gaussian.mean, covariance=gaussian.covariance, num_chains=plan[0],
                num_warmup=plan[1], num_draws=plan[2], target_accept=options.target_accept, generator=stream(0, "bench/hmc"),
            )  # fmt: skip

        run()
        seconds, drawn = timed(run, self.clock.device)
        steps = float(drawn.n_steps.double().mean()) * (plan[1] + plan[2])
        work = gradient_work(self.count, self.problem.layout, draws=plan[0]).times(steps)
        self.clock.tell(f"hmc, {plan[0]} chains of {plan[1]} + {plan[2]}", seconds, work, most=0.5)
        seconds, judged = timed(
            lambda: convergence(drawn.draws.cpu().numpy(), device=self.clock.device), self.clock.device
        )
        self.clock.tell("hmc, convergence of the draws", seconds, Work(bytes=float(drawn.draws.nbytes)), most=None)
        if not self.clock.is_quick:
            self.clock.ledger.check("hmc, R-hat", judged.r_hat if judged.r_hat is not None else math.nan, GOOD_RHAT)


def measure(clock: Clock, folder: Path, num_examples: int) -> None:
    """fit-laplace, refine and hmc on the embedded case, its examples repeated up to so many."""
    found: list[Lenet] = []
    clock.ledger.item("features of the LeNet-5 head", lambda: found.append(_lenet(clock, folder, num_examples)))
    if found:
        clock.ledger.note("the LeNet-5 head", f"the embedded case's examples, repeated to {found[0].count}")
        jobs = (found[0].search, found[0].radial, found[0].affine, found[0].chains)
        for job in jobs:
            clock.ledger.item(f"LeNet-5 head, {job.__name__}", job)


def _lenet(clock: Clock, folder: Path, num_examples: int) -> Lenet:
    data = f"--data train=npz:{fixture_path('train.npz')} --data val=npz:{fixture_path('val.npz')}"
    line = f"extract-features {fixture_path('lenet5-fmnist.pt')} --model lenet5 {data} --run-dir FOLDER/run"
    done = run_line(line, folder, str(clock.device))
    if done.code != 0:
        raise RuntimeError(done.failure)
    problem = load_problem(folder / "run/features/train.h5", PRIOR_PRECISION, clock.device)
    rows = torch.arange(num_examples, device=clock.device) % len(problem.features)
    repeated = Problem(problem.features[rows], problem.labels[rows], problem.head, problem.layout, PRIOR_PRECISION)
    val = read_features(folder / "run/features/val.h5")
    assert val.labels is not None
    return Lenet(
        repeated,
        (torch.from_numpy(val.features).to(clock.device), torch.from_numpy(val.labels).to(clock.device)),
        clock,
    )


def measure_network(clock: Clock, sizes: tuple[int, ...], num_examples: int) -> None:
    """One epoch of lrt in batches of 100: of two epochs what the second adds, captures left out."""
    features, labels = examples(num_examples, sizes[0], sizes[-1], clock.device)

    def epochs(count: int) -> float:
        model = latent_model(sizes, 1, "lrt", clock.device)
        plan = Plan(epochs=count, batch_size=100, learning_rate=1e-3)
        generator = stream(0, "bench/lbbnn")
        return timed(lambda: fit_latent(model, features, labels, plan, generator=generator), clock.device)[0]

    epochs(1)
    seconds = max(1e-9, epochs(3) - epochs(1)) / 2
    weights = sum(a * b for a, b in pairwise(sizes))
    steps = -(-num_examples // 100)
    # Two products forward and four backward an example; a step reads or writes three factors, their gradients and Adam's
    # two moments, 20 numbers a weight.
    work = Work(flops32=12.0 * weights * num_examples, bytes=80.0 * weights * steps)
    clock.tell(f"fit-lbbnn lrt, an epoch of {num_examples} in {'-'.join(map(str, sizes))}", seconds, work, most=0.35)
