"""Step *lenet-speed*: what users wait for on a LeNet-5 head (N = 60,000, P = 850), in this process, after a warm-up.

On Fashion-MNIST where --data has it, else on the embedded case's examples, repeated. Beside ours, in the same run: Pyro's SVI
on the published refinement, of which some steps are timed, and its NUTS on the ordinary model until a limit.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import theirs
import torch
from gpu_steps.bench import Bench, Clock
from gpu_steps.lines import run_line
from machine import Work, covariance_work, curvature_work, gradient_work, timed
from problem import Problem, fit_laplace, load_problem
from refine_job import PUBLISHED, PUBLISHED_EPOCHS, time_to_elbo
from torch import Tensor

from bnncli.artifacts.features import read_features
from bnncli.commands.demo import fixture_path
from bnncli.commands.hmc import HmcOptions
from bnncli.evaluation.convergence import Convergence, convergence
from bnncli.flows import choose_recipe
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.laplace import LaplaceFit
from bnncli.inference.prior_search import PriorSearch, search
from bnncli.inference.refine import RefineFit, fit_flow
from bnncli.numerics.random import stream

PRIOR_PRECISION = 510.0
NUM_EXAMPLES = 60_000
EXACT_FITS, CANDIDATES = 8, 18  # of a search for the prior precision: whole decades, then halved steps
GOOD_RHAT = 1.01
SVI_STEPS = 300  # that are timed, of 9,380
NUTS_WARMUP, NUTS_SECONDS = 10, 20.0


def run(bench: Bench) -> None:
    """Time fit-laplace, refine and hmc, then Pyro."""
    clock = bench.clock()
    found: list[Lenet] = []
    bench.ledger.item("features of the LeNet-5 head", lambda: found.append(_lenet(bench, clock)))
    if not found:
        return
    lenet = found[0]
    for job in (lenet.search, lenet.radial, lenet.affine, lenet.chains, lenet.svi, lenet.nuts):
        bench.ledger.item(f"LeNet-5 head, {job.__name__}", job)


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

        def run() -> PriorSearch:
            return search(
                self.problem.target(), start=self.problem.head, generator=stream(0, "bench/search"), held_out=held_out
            )

        self.clock.job(f"fit-laplace with search, N {self.count}", work, run, most=0.2)
        self.profile("the search", run)

    def radial(self) -> None:
        """The published refinement, and the time in which another plan is as good."""
        epochs = 1 if self.clock.bench.is_quick else PUBLISHED_EPOCHS
        work = gradient_work(self.count, self.problem.layout).times(epochs)

        def run(epochs: int = epochs) -> RefineFit:
            return fit_flow(
                self.problem.target(), self.beside.gaussian, flow=PUBLISHED.flow, space=PUBLISHED.space,
                length=PUBLISHED.length, epochs=epochs, batch_size=PUBLISHED.batch_size, num_draws=PUBLISHED.num_draws,
                learning_rate=PUBLISHED.learning_rate, generator=stream(0, "bench/refine"),
            )  # fmt: skip

        run(1)  # captures and libraries
        seconds, fit = timed(run, self.clock.device)
        self.clock.tell(f"refine radial, {epochs} epochs of batches of 128", seconds, work, most=5.5)
        limit = 5.0 if self.clock.bench.is_quick else 20.0
        found = time_to_elbo(self.problem, self.beside.gaussian, fit.posterior, "radial", limit=limit)
        if found is None:
            self.clock.bench.ledger.miss("refine radial to equal ELBO", f"no plan reached it within {limit:g} s")
            return
        plan, epochs, seconds, _ = found
        work = gradient_work(self.count, self.problem.layout, draws=plan.num_draws).times(epochs)
        name = f"refine radial to equal ELBO ({epochs} epochs of batches of {plan.batch_size})"
        self.clock.tell(name, seconds, work, most=0.5)

    def affine(self) -> None:
        """refine as it is by default, from the mode."""
        recipe = choose_recipe("affine")
        epochs = 5 if self.clock.bench.is_quick else recipe.epochs

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
        """hmc as it is by default; then as many draws as its R-hat needs; and apart the judging of them."""
        options, is_quick = HmcOptions(), self.clock.bench.is_quick
        chains, warmup, draws = (4, 5, 16) if is_quick else (options.chains, options.warmup, options.draws)

        def run(draws: int = draws) -> HmcRun:
            gaussian = self.at_mode.gaussian
            return sample_hmc(
                self.problem.target(), mode=gaussian.mean, covariance=gaussian.covariance, num_chains=chains,
                num_warmup=warmup, num_draws=draws, target_accept=options.target_accept, generator=stream(0, "bench/hmc"),
            )  # fmt: skip

        def judged(drawn: HmcRun) -> Convergence:
            return convergence(drawn.draws.cpu().numpy(), device=self.clock.device)

        run()
        seconds, drawn = timed(run, self.clock.device)
        found = judged(drawn)
        steps = float(drawn.n_steps.double().mean()) * (warmup + draws)
        work = gradient_work(self.count, self.problem.layout, draws=chains).times(steps)
        name = f"hmc, {chains} chains of {warmup}"
        self.clock.tell(f"{name} + {draws}", seconds, work, most=None, r_hat=found.r_hat, ess=found.ess_bulk)
        self.profile("hmc", run)
        seconds, _ = timed(lambda: judged(drawn), self.clock.device)
        self.clock.tell("hmc, convergence of the draws", seconds, Work(bytes=float(drawn.draws.nbytes)), most=None)
        for enough in range(draws // 4, draws + 1, max(1, draws // 16)):
            seconds, fewer = timed(lambda enough=enough: run(enough), self.clock.device)
            r_hat = judged(fewer).r_hat
            if is_quick or (r_hat is not None and r_hat <= GOOD_RHAT):
                self.clock.judge(f"{name} + {enough}, seconds to R-hat {GOOD_RHAT:g}", seconds, 0.5, r_hat=r_hat)
                return
        self.clock.bench.ledger.miss(f"{name}, R-hat {GOOD_RHAT:g}", f"not reached with {draws} draws")

    def svi(self) -> None:
        """Pyro's SVI on the published refinement: some steps, and what all of them take at that rate."""
        steps = 5 if self.clock.bench.is_quick else SVI_STEPS
        all_steps = PUBLISHED_EPOCHS * -(-self.count // PUBLISHED.batch_size)
        settings: dict[str, Any] = {
            "length": PUBLISHED.length, "batch_size": PUBLISHED.batch_size, "learning_rate": PUBLISHED.learning_rate, "seed": 0,
        }  # fmt: skip
        theirs.refine_by_svi(self.problem, self.beside.gaussian, num_steps=5, **settings)
        seconds = theirs.refine_by_svi(self.problem, self.beside.gaussian, num_steps=steps, **settings).seconds
        whole = seconds / steps * all_steps
        self.clock.judge(f"Pyro SVI, radial, seconds of {all_steps} steps at the rate of {steps}", whole, None)

    def nuts(self) -> None:
        """Pyro's NUTS from the checkpoint, its warm-up short: the seconds of a draw are at best these."""
        warmup, seconds = (2, 0.1) if self.clock.bench.is_quick else (NUTS_WARMUP, NUTS_SECONDS)
        drawn = theirs.sample_by_nuts(self.problem, num_warmup=warmup, max_seconds=seconds, max_draws=2000, seed=0)
        each = drawn.draw_seconds / drawn.draws.shape[1]
        self.clock.judge("Pyro NUTS, ordinary model, seconds a draw", each, None, draws=drawn.draws.shape[1],
                         warmup_seconds=drawn.warmup_seconds, gradients=drawn.num_gradients)  # fmt: skip

    def profile(self, what: str, run: Callable[[], Any]) -> None:
        """Note where the host's and the device's time goes, in the JSON alone."""
        if self.clock.bench.is_quick or self.clock.device.type != "cuda":
            return
        host = cProfile.Profile()
        host.runcall(run)
        text = io.StringIO()
        pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(25)
        with torch.profiler.profile() as device:
            run()
            torch.cuda.synchronize()
        table = device.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=60)
        self.clock.bench.ledger.note(
            f"profile of {what}", "in the JSON", host=text.getvalue().splitlines(), device=table.splitlines()
        )


def _lenet(bench: Bench, clock: Clock) -> Lenet:
    """Extract the features on the device."""
    if bench.data is not None and bench.checkpoints is not None and not bench.is_quick:
        checkpoint, train, test = bench.checkpoints / "lenet-fmnist-1.pt", bench.data / "fmnist-train.npz", bench.data / "fmnist-test.npz"  # fmt: skip
        data = f"--data train=npz:{train} --data test=npz:{test} --hold-out val=test:2000"
    else:
        checkpoint = fixture_path("lenet5-fmnist.pt")
        data = f"--data train=npz:{fixture_path('train.npz')} --data val=npz:{fixture_path('val.npz')}"
    done = run_line(
        f"extract-features {checkpoint} --model lenet5 {data} --run-dir FOLDER/run", bench.folder, str(clock.device)
    )
    if done.code != 0:
        raise RuntimeError(done.failure)
    problem = load_problem(bench.folder / "run/features/train.h5", PRIOR_PRECISION, clock.device)
    rows = torch.arange(600 if bench.is_quick else NUM_EXAMPLES, device=clock.device) % len(problem.features)
    repeated = Problem(problem.features[rows], problem.labels[rows], problem.head, problem.layout, PRIOR_PRECISION)
    val = read_features(bench.folder / "run/features/val.h5")
    assert val.labels is not None
    bench.ledger.note("the LeNet-5 head", f"{len(problem.features)} examples, repeated to {len(rows)}")
    return Lenet(
        repeated,
        (torch.from_numpy(val.features).to(clock.device), torch.from_numpy(val.labels).to(clock.device)),
        clock,
    )
