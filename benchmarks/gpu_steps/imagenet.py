"""Step *imagenet*: a head of ImageNet's size, 1.28 million x 2,048 float16 features, K = 1,000, made on the device.

The mode and Kronecker factors; the gradients and energies of hmc, and the rate of its transitions; a step of refine; closed
forms of predict. Where the features lie on the CPU, a pass over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from gpu_steps.bench import Bench, Clock
from gpu_steps.floors import BUS, product_rates
from gpu_steps.heads import made_head, made_target
from machine import best_of, covariance_work, curvature_work, gradient_work, timed
from torch import Tensor

from bnncli.flows.affine import Affine
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.mode import covariance_at, find_suitable_mode
from bnncli.inference.refine import fit_flow
from bnncli.integrators.bridge import Bridge
from bnncli.integrators.mean_field import MeanField
from bnncli.integrators.probit import Probit
from bnncli.numerics.random import stream
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import Covariance
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import CoarseGradient

SIZES, QUICK = (1_281_167, 2048, 1000), (400, 20, 5)  # N, D, K
CHAINS, WARMUP, DRAWS = 8, 40, 160
MANY_CHAINS = 16  # hmc's default
TRANSITIONS = 6  # that are timed
TEST_ROWS = 50_000
MINUTES = 10.0  # of hmc
STREAMED = 1.3  # times the resident pass
# Nats, of the difference between two chains far from the mode. Sums of float16 products are cut off, not rounded: logits are short by 2e-6
# of themselves. Within a trajectory of the typical set that should be some .004 nats (not measured).
ENERGY = 0.2


def run(bench: Bench) -> None:
    """Time all parts on one target."""
    clock = bench.clock()
    head = Head(clock)
    for part in (head.find_mode, head.make_factors, head.chains, head.predict, head.refine, head.stream):
        bench.ledger.item(f"ImageNet head, {part.__name__.replace('_', ' ')}", part)


@dataclass
class Head:
    """The target and what is made of it, part after part."""

    clock: Clock
    target: LastLayerTarget = field(init=False)
    mode: Tensor = field(init=False)
    covariance: Covariance = field(init=False)

    def __post_init__(self) -> None:
        count, num_features, num_outputs = QUICK if self.clock.bench.is_quick else SIZES
        layout = HeadLayout(num_outputs, num_features)
        self.target = made_target(self.clock.device, count, layout, dtype=torch.float16)
        self.mode = made_head(layout, self.clock.device)

    @property
    def name(self) -> str:
        """The sizes, for people."""
        layout = self.target.layout
        return f"N {self.target.num_examples}, D {layout.num_features}, K {layout.num_outputs}"

    def find_mode(self) -> None:
        """From the weights that the labels were drawn with, as from a trained head."""
        work = gradient_work(self.target.num_examples, self.target.layout, is_double=True).times(2)
        seconds, found = timed(lambda: find_suitable_mode(self.target, self.mode), self.clock.device)
        self.mode = found.theta
        self.clock.tell(f"mode, {self.name}", seconds, work, most=None, steps=found.num_iterations, decrement=found.newton_decrement)  # fmt: skip
        self.seconds = seconds

    def make_factors(self) -> None:
        """Kronecker factors at the mode, and their covariance."""
        layout = self.target.layout
        work = curvature_work("kron", self.target.num_examples, layout).plus(covariance_work("kron", layout))
        seconds, found = timed(lambda: covariance_at(self.target, self.mode, "kron"), self.clock.device)
        self.covariance = found.covariance
        self.clock.tell(f"Kronecker factors, {self.name}", seconds, work, most=None)
        self.clock.judge("mode and Kronecker factors, seconds", self.seconds + seconds, 10.0)

    def chains(self) -> None:
        """Gradients and energies of hmc, then transitions, and the minutes of a run at their rate."""
        clock, layout = self.clock, self.target.layout
        theta = self.mode + 0.01 * torch.randn(MANY_CHAINS, layout.num_params, generator=torch.Generator(clock.device).manual_seed(0),
                                               dtype=torch.float64, device=clock.device)  # fmt: skip
        for chains in (CHAINS, MANY_CHAINS):
            own = theta[:chains]
            name, work = (
                f"of {chains} chains, {self.name}",
                gradient_work(self.target.num_examples, layout, draws=chains),
            )
            if chains == CHAINS:
                clock.job(f"energy {name}", work.times(0.5), partial(self.target.log_joint, own), most=None, repeats=1)
            else:
                clock.job(
                    f"float32 gradient {name}", work, partial(self.target.log_joint_and_grad, own), most=None, repeats=1
                )
        pair = theta[:2]
        exact, got = self.target.log_joint_and_grad(pair, dtype=torch.float64)[0], self.target.log_joint(pair)
        apart = float(((got[0] - got[1]) - (exact[0] - exact[1])).abs())
        clock.bench.ledger.check("energies of two chains, difference from float64's, nats", apart, ENERGY)
        rates = product_rates(clock.device, clock.rates, is_quick=clock.bench.is_quick)
        anchored = {precision: CoarseGradient.about(self.target, self.mode, precision) for precision in rates}
        for precision, coarse in anchored.items():
            work = gradient_work(self.target.num_examples, layout, draws=CHAINS)
            rated = work._replace(flops32=work.flops32 * clock.rates.flops32 / rates[precision])
            displacements = theta[:CHAINS] - self.mode
            clock.job(f"{precision} gradient of {CHAINS} chains, {self.name}", rated, partial(coarse, displacements), most=None, repeats=1)  # fmt: skip
        seconds, drawn = timed(
            lambda: sample_hmc(
                self.target, mode=self.mode, covariance=self.covariance, generator=stream(0, "bench/hmc"), num_chains=CHAINS,
                num_warmup=0, num_draws=TRANSITIONS, coarse=anchored["bfloat16"],
            ), clock.device,
        )  # fmt: skip
        each, steps = seconds / TRANSITIONS, float(drawn.n_steps.double().mean())
        clock.judge(f"hmc --gradients bfloat16 --chains {CHAINS}, minutes of {WARMUP} + {DRAWS} transitions at the rate of {TRANSITIONS}",
                    each * (WARMUP + DRAWS) / 60, MINUTES, seconds_a_transition=each, gradients_a_transition=steps)  # fmt: skip

    def predict(self) -> None:
        """Closed forms for a test set of ImageNet's size."""
        clock, layout = self.clock, self.target.layout
        count = min(TEST_ROWS, self.target.num_examples)
        features = self.target.features[:count].float()
        posterior = Gaussian(self.mode, self.covariance, layout, self.target.prior)
        generator = torch.Generator()
        for integrator in (Probit(), MeanField(), Bridge()):
            name = type(integrator).__name__
            run = partial(integrator.predict, posterior, features, num_samples=None, generator=generator)
            clock.job(
                f"predict {name}, {count} rows, K {layout.num_outputs}",
                gradient_work(count, layout),
                run,
                most=None,
                repeats=1,
            )

    def refine(self) -> None:
        """Two epochs of affine layers from the Kronecker Gaussian; the first one captures."""
        clock = self.clock
        base = Gaussian(self.mode, self.covariance, self.target.layout, self.target.prior)

        def epochs(count: int) -> float:
            run = partial(fit_flow, self.target, base, flow="affine", epochs=count, generator=stream(0, "bench/refine"))
            return timed(run, clock.device)[0]

        seconds = max(1e-9, epochs(2) - epochs(1))
        work = gradient_work(self.target.num_examples, self.target.layout, draws=Affine.recipe.num_draws)
        clock.tell(f"refine affine, an epoch, {self.name}", seconds, work, most=None)

    def stream(self) -> None:
        """A gradient of few chains over features in the CPU's memory, against resident ones."""
        clock, chains = self.clock, 4
        theta = self.mode.expand(chains, -1)
        seconds = {}
        for where in ("resident", "streamed"):
            features = self.target.features if where == "resident" else self.target.features.cpu()
            target = LastLayerTarget(features, self.target.labels, self.target.layout, self.target.prior)
            seconds[where] = best_of(partial(target.log_joint_and_grad, theta), clock.device, repeats=1)[0]
        clock.judge("streamed pass, of the resident one", seconds["streamed"] / seconds["resident"], STREAMED,
                    bus_seconds=features.nbytes / BUS, **seconds)  # fmt: skip
