"""Options of fit-sghmc."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import option
from bnncli.options.target import GivenPriorOptions

CYCLICAL, SGHMC, SGLD = "cyclical", "sghmc", "sgld"
BASE, RMSPROP, NONE = "base", "rmsprop", "none"


@dataclass(frozen=True)
class FitSghmcOptions(GivenPriorOptions):
    """Options of fit-sghmc."""

    sampler: str | None = option(
        None,
        "cyclical: the learning rate falls along a cosine in each cycle, which explores without noise first and samples at its end; "
        "sghmc: one rate, and noise throughout; sgld: the same without momentum. By default sghmc over the last layer, whose posterior has one mode, without \0cycles\0, "
        "and cyclical over other layers.",
        choices=(CYCLICAL, SGHMC, SGLD),
    )
    chains: int = option(4, "Chains, run as one batch; all see the same minibatches.", minimum=1)
    epochs: int | None = option(
        None,
        "Passes over the training split, of all cycles together; by default 1000, or 250 a cycle, and over other layers than the last 40, or 10.",
        minimum=1,
    )
    cycles: int | None = option(None, "Cycles (cyclical); 4 by default.", minimum=1)
    draws: int | None = option(
        None,
        "Draws kept of each chain and cycle, evenly over its sampling epochs and at its end: by default 200, in cycles 50, and over other layers than the last 50, or 3, or as many as there are such epochs.",
        minimum=1,
    )
    exploration: float | None = option(
        None,
        "Share of each cycle, or of all epochs without cycles, before draws are kept; by default 0.8, without cycles 0.3. In cycles it has no noise.",
        minimum=0.0,
        maximum=0.99,
    )
    batch_size: int | None = option(
        None,
        "Examples a step, all where it is larger than the split; by default 65536, over other layers than the last 128. Minibatches "
        "add noise of their own: the summary says how much.",
        minimum=1,
    )
    learning_rate: float | None = option(
        None,
        "Step size for the mean loss, the first of each cycle. By default the largest at which the length of steps makes the variance along "
        "the stiffest direction, which is looked for, at most 5 % too large while draws are kept.",
        minimum=1e-15,
    )
    momentum_decay: float | None = option(
        None,
        "Share of the momentum that a step loses; 0.2 by default with \0preconditioner\0 base, else 0.05, of sgld 1.",
        minimum=1e-6,
        maximum=1.0,
    )
    temperature: float = option(
        1.0,
        "Of the posterior: 1 samples it, lower ones are colder, 0 adds no noise. (Published code of cyclical SGHMC has one over the number "
        "of examples where its text says 1.)",
        minimum=0.0,
    )
    preconditioner: str | None = option(
        None,
        "base: the covariance of \0base\0, so that one step size suits all directions, by default over the last layer where that is a Gaussian; rmsprop: one step size a "
        "parameter, from the gradients of minibatches, that stands still while draws are kept; none.",
        choices=(BASE, RMSPROP, NONE),
    )
    start: str = option(
        "checkpoint",
        "Where chains start: the network's weights, or init, each from PyTorch's initialisation of the layers (networks without batch norm).",
        choices=("checkpoint", "init"),
    )
    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every epoch.",
        minimum=0,
        numeric=False,
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
                f"\0draws\0: expected at most {self.num_sampling}, the epochs of a cycle in which draws are kept; got {self.num_draws}",
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
