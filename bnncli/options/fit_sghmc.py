"""Options of fit-sghmc."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import option
from bnncli.options.shared import GivenPriorOptions

CYCLICAL, SGHMC, SGLD = "cyclical", "sghmc", "sgld"
BASE, RMSPROP, NONE = "base", "rmsprop", "none"


@dataclass(frozen=True)
class FitSghmcOptions(GivenPriorOptions):
    """Options of fit-sghmc."""

    sampler: str | None = option(
        None,
        "Sampler: cyclical (cosine learning rate per cycle), sghmc, or sgld (no momentum). Default: sghmc for "
        "the last layer, else cyclical.",
        choices=(CYCLICAL, SGHMC, SGLD),
        group="Sampling",
    )
    chains: int = option(4, "Number of chains, run as one batch.", minimum=1, group="Sampling")
    epochs: int | None = option(
        None,
        "Total passes over the training split, across all cycles. Default: 1000, or 250 times the number of "
        "cycles if you set it; with other layers, 40, or 10 times the number of cycles.",
        minimum=1,
        group="Sampling",
    )
    cycles: int | None = option(
        None, "Number of cycles (cyclical). Default: 4.", minimum=1, group="Sampling", is_rare=True
    )
    draws: int | None = option(
        None,
        "Draws to keep per chain and cycle. Default: 200 (50 in cycles); other layers 50 (3 in cycles).",
        minimum=1,
        group="Sampling",
    )
    exploration: float | None = option(
        None,
        "Share of each cycle (or of all epochs) before draws are kept. Default: 0.8 in cycles, else 0.3.",
        minimum=0.0,
        maximum=0.99,
        group="Sampling",
        is_rare=True,
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: 65536; other layers 128.", minimum=1, group="Sampling"
    )
    learning_rate: float | None = option(
        None,
        "Initial step size of each cycle, for the mean loss. Default: the largest one whose bias along the "
        "stiffest direction is small.",
        minimum=1e-15,
        group="Sampling",
    )
    momentum_decay: float | None = option(
        None,
        "Share of the momentum lost per step. Default: 0.2 with \0preconditioner\0 base, else 0.05.",
        minimum=1e-6,
        maximum=1.0,
        group="Sampling",
        is_rare=True,
    )
    temperature: float = option(
        1.0,
        "Posterior temperature. 1 samples the posterior; 0 adds no noise.",
        minimum=0.0,
        group="Sampling",
        is_rare=True,
    )
    preconditioner: str | None = option(
        None,
        "Preconditioner: the covariance of \0base\0, rmsprop, or none. Default: base for the last layer, if "
        "\0base\0 is Gaussian.",
        choices=(BASE, RMSPROP, NONE),
        group="Sampling",
        is_rare=True,
    )
    start: str = option(
        "checkpoint",
        "Start from the checkpoint's weights, or from PyTorch's initialisation (init).",
        choices=("checkpoint", "init"),
        group="Sampling",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Sampling"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every epoch.",
        minimum=0,
        numeric=False,
        group="Sampling",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_cyclical and self.cycles is not None:
            raise UsageError(f"\0cycles\0 is for \0sampler\0 cyclical; {self.chosen_sampler} has none")
        if self.chosen_sampler == SGLD and self.momentum_decay not in (None, 1.0):
            raise UsageError("\0momentum_decay\0 is for \0sampler\0 cyclical or sghmc; sgld has no momentum")
        if self.num_epochs % self.num_cycles:
            raise UsageError(
                f"\0epochs\0: expected a multiple of the {self.num_cycles} \0cycles\0; got {self.num_epochs}"
            )
        if self.num_draws > self.num_sampling:
            raise UsageError(
                f"\0draws\0: expected at most {self.num_sampling}, the sampling epochs per cycle; got {self.num_draws}",
                hint="use more \0epochs\0, or a smaller \0exploration\0",
            )

    @property
    def chosen_sampler(self) -> str:
        """As asked for or by default."""
        return self.sampler or (SGHMC if self.is_last_layer and self.cycles is None else CYCLICAL)

    @property
    def may_whiten(self) -> bool:
        """Whether the covariance of a Gaussian base preconditions: where it is asked for, and by default over the last layer.

        Not over others by default, which take minibatches: these have the noise of the stiffest direction in all of them then.
        """
        return self.preconditioner == BASE or (self.preconditioner is None and self.is_last_layer)

    @property
    def is_cyclical(self) -> bool:
        """Whether there are cycles."""
        return self.chosen_sampler == CYCLICAL

    @property
    def num_epochs(self) -> int:
        """Of all cycles together, as asked for or by default."""
        in_cycle = (250 if self.is_last_layer else 10) * (1 if self.is_cyclical else 4)
        return self.epochs or in_cycle * self.num_cycles

    @property
    def num_cycles(self) -> int:
        """As asked for or by default."""
        return (self.cycles or 4) if self.is_cyclical else 1

    @property
    def cycle_length(self) -> int:
        """Epochs of a cycle; all without cycles."""
        return max(1, self.num_epochs // self.num_cycles)

    @property
    def num_exploring(self) -> int:
        """Epochs of a cycle before draws are kept: one is left at least."""
        share = self.exploration
        if share is None:
            share = 0.8 if self.is_cyclical else 0.3
        return min(round(share * self.cycle_length), self.cycle_length - 1)

    @property
    def num_sampling(self) -> int:
        """Epochs of a cycle in which draws are kept."""
        return self.cycle_length - self.num_exploring

    @property
    def num_draws(self) -> int:
        """Of a cycle, as asked for or by default."""
        if self.draws is not None:
            return self.draws
        many = (50, 200) if self.is_last_layer else (3, 50)
        return min(many[not self.is_cyclical], self.num_sampling)

    @property
    def examples_a_step(self) -> int:
        """As asked for or by default."""
        return self.batch_size or (65536 if self.is_last_layer else 128)

    def decay(self, *, is_whitened: bool) -> float:
        """Share of the momentum that a step loses, as asked for or by default."""
        return 1.0 if self.chosen_sampler == SGLD else self.momentum_decay or (0.2 if is_whitened else 0.05)
