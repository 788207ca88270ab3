"""Options of fit-vi."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import option
from bnncli.options.shared import GivenPriorOptions

# By default: a fit to 1,000 examples of 10 features ends 100 nats short of its ELBO after 200 steps, within 0.1 after 4,000.
LEAST_STEPS, LEAST_NETWORK_STEPS = 4000, 2000


@dataclass(frozen=True)
class FitViOptions(GivenPriorOptions):
    """Options of fit-vi."""

    estimator: str | None = option(
        None,
        "Gradient estimator: draws of parameters (reparam), of layer outputs (local), or sign flips (flipout). "
        "Default: local, or reparam for other layers and ivon.",
        choices=("reparam", "local", "flipout"),
        group="Training",
        is_rare=True,
    )
    optimizer: str = option(
        "adam", "Optimizer: adam, or ivon (variational online Newton).", choices=("adam", "ivon"), group="Training"
    )
    epochs: int | None = option(
        None,
        f"Maximum passes over the training split. Default: 200 and at least {LEAST_STEPS:,} steps; other layers "
        f"20 and {LEAST_NETWORK_STEPS:,}.",
        minimum=1,
        group="Training",
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: 1024; other layers 128.", minimum=1, group="Training"
    )
    learning_rate: float | None = option(
        None,
        "Initial learning rate, with cosine decay. Default: 0.01 (adam), 0.1 (ivon); other layers a tenth of that.",
        minimum=1e-12,
        group="Training",
    )
    num_draws: int | None = option(
        None, "Draws per step (reparam). Default: 4; other layers 1.", minimum=1, group="Training", is_rare=True
    )
    kl_weight: float = option(
        1.0,
        "Weight of the KL term. 1 is the ELBO; smaller values give a colder posterior.",
        minimum=1e-9,
        group="Training",
        is_rare=True,
    )
    patience: int | None = option(
        None,
        "Stop after this many rounds without improvement; with 0, never stop early. Default: 20 (adam), 0 (ivon).",
        minimum=0,
        group="Training",
        is_rare=True,
    )
    elbo_draws: int | None = option(
        None, "Draws for the final ELBO. Default: 256; other layers 32.", minimum=2, group="Training", is_rare=True
    )
    start: str = option(
        "checkpoint",
        "Start from the checkpoint's weights, or from PyTorch's initialisation (init).",
        choices=("checkpoint", "init"),
        group="Training",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Training"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every round.",
        minimum=0,
        numeric=False,
        group="Training",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "ivon" and self.estimator not in (None, "reparam"):
            raise UsageError(f"\0optimizer\0 ivon needs \0estimator\0 reparam; got {self.estimator}")
        if self.num_draws is not None and self.chosen_estimator != "reparam":
            raise UsageError(
                f"\0num_draws\0 is for \0estimator\0 reparam; {self.chosen_estimator} draws once per example"
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
