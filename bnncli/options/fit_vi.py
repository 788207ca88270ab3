"""Options of fit-vi."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import option
from bnncli.options.target import GivenPriorOptions

# By default: a fit to 1,000 examples of 10 features ends 100 nats short of its ELBO after 200 steps, within 0.1 after 4,000.
LEAST_STEPS, LEAST_NETWORK_STEPS = 4000, 2000


@dataclass(frozen=True)
class FitViOptions(GivenPriorOptions):
    """Options of fit-vi."""

    estimator: str | None = option(
        None,
        "How gradients are estimated: reparam, by draws of theta; local, by draws of each layer's outputs (linear layers); flipout, by one draw with signs "
        "turned for each example (convolutions too). By default local, over other layers than the last or with \0optimizer\0 ivon reparam.",
        choices=("reparam", "local", "flipout"),
    )
    optimizer: str = option(
        "adam",
        "adam, on means and log standard deviations; ivon, which learns the variances from products of gradients and noise.",
        choices=("adam", "ivon"),
    )
    epochs: int | None = option(
        None,
        f"Passes over the training split, at most; by default 200, and at least {LEAST_STEPS:,} steps, over other layers than the last 20, and at least "
        f"{LEAST_NETWORK_STEPS:,} steps.",
        minimum=1,
    )
    batch_size: int | None = option(
        None,
        "Examples a step, all where it is larger than the split; 1024 by default, over other layers than the last 128.",
        minimum=1,
    )
    learning_rate: float | None = option(
        None,
        "First learning rate, which decays to 0 along a cosine; by default 0.01 of adam and 0.1 of ivon, over other layers than the last a tenth of that.",
        minimum=1e-12,
    )
    num_draws: int | None = option(
        None,
        "Draws of theta a step, of the estimator reparam; 4 by default, over other layers than the last 1.",
        minimum=1,
    )
    kl_weight: float = option(
        1.0,
        "Weight of the divergence to the prior: 1 is the ELBO; smaller ones give a colder posterior, which is no approximation of the target.",
        minimum=1e-9,
    )
    patience: int | None = option(
        None,
        "End early when the objective has stood still for this many rounds (epochs, or 25 steps where an epoch has fewer), 0 never; 20 by default, of ivon, "
        "whose variances come late, 0.",
        minimum=0,
    )
    elbo_draws: int | None = option(
        None,
        "Draws for the final ELBO, on the full data: 256 by default, over other layers than the last 32.",
        minimum=2,
    )
    start: str = option(
        "checkpoint",
        "Where the means start: the network's weights, or init, PyTorch's initialisation of the layers (networks without batch norm).",
        choices=("checkpoint", "init"),
    )
    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every round.",
        minimum=0,
        numeric=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "ivon" and self.estimator not in (None, "reparam"):
            raise UsageError(f"\0optimizer\0 ivon needs draws of theta: \0estimator\0 reparam; got {self.estimator}")
        if self.num_draws is not None and self.chosen_estimator != "reparam":
            raise UsageError(
                f"\0num_draws\0 is of \0estimator\0 reparam; {self.chosen_estimator} draws anew for each example"
            )

    @property
    def chosen_estimator(self) -> str:
        """As asked for or by default."""
        return self.estimator or ("local" if self.is_last_layer and self.optimizer == "adam" else "reparam")

    def num_epochs(self, num_examples: int) -> int:
        """As asked for or by default: of few examples as many as make enough steps."""
        num_batches = -(-num_examples // self.examples_a_step)
        by_default, steps = (200, LEAST_STEPS) if self.is_last_layer else (20, LEAST_NETWORK_STEPS)
        return self.epochs or max(by_default, -(-steps // num_batches))

    @property
    def examples_a_step(self) -> int:
        """As asked for or by default."""
        return self.batch_size or (1024 if self.is_last_layer else 128)

    @property
    def first_rate(self) -> float:
        """As asked for or by default."""
        by_default = 0.01 if self.optimizer == "adam" else 0.1
        return self.learning_rate or by_default * (1 if self.is_last_layer else 0.1)

    @property
    def draws_a_step(self) -> int:
        """As asked for or by default."""
        by_default = 4 if self.is_last_layer and self.chosen_estimator == "reparam" else 1
        return self.num_draws or by_default

    @property
    def rounds_of_patience(self) -> int:
        """As asked for or by default."""
        return self.patience if self.patience is not None else 0 if self.optimizer == "ivon" else 20

    @property
    def num_elbo_draws(self) -> int:
        """As asked for or by default."""
        return self.elbo_draws or (256 if self.is_last_layer else 32)
