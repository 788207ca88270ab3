"""Options of fit-swag."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import DataError, UsageError
from bnncli.options.declaration import option
from bnncli.options.target import GivenPriorOptions


@dataclass(frozen=True)
class FitSwagOptions(GivenPriorOptions):
    """Options of fit-swag."""

    warmup: int | None = option(
        None,
        "Epochs before iterates are taken, in which SGD goes from the network's weights to where the target is; 50 by default, over other layers than the last 5.",
        minimum=0,
    )
    epochs: int | None = option(
        None,
        "Epochs after that, at whose ends an iterate each is taken; 100 by default, over other layers than the last 20.",
        minimum=2,
    )
    rank: int | None = option(
        None,
        "Deviations of the last iterates that are kept: the columns of the low-rank half; 20 by default, or as many as there are.",
        minimum=2,
    )
    batch_size: int | None = option(
        None,
        "Examples a step: 128 by default, or a quarter of a smaller split. The spread comes of their noise.",
        minimum=1,
    )
    learning_rate: float | None = option(
        None,
        "Constant learning rate of SGD for the mean loss, which sets the spread. By default the one at which SGD with fresh noise would be nearest to the "
        "posterior (Mandt et al. 2017), from the noise of the gradients, but no more than half of what is stable.",
        minimum=1e-15,
    )
    momentum: float = option(0.9, "Share of the momentum that a step keeps.", minimum=0.0, maximum=0.999)
    scale: float = option(1.0, "Factor on the covariance, half diagonal and half low-rank as published.", minimum=1e-12)
    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every epoch.",
        minimum=0,
        numeric=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_columns > self.num_epochs:
            raise UsageError(f"\0rank\0: expected at most the {self.num_epochs} \0epochs\0; got {self.rank}")

    @property
    def num_warmup(self) -> int:
        """As asked for or by default."""
        return self.warmup if self.warmup is not None else 50 if self.is_last_layer else 5

    @property
    def num_epochs(self) -> int:
        """As asked for or by default."""
        return self.epochs or (100 if self.is_last_layer else 20)

    @property
    def num_columns(self) -> int:
        """As asked for or by default."""
        return self.rank or min(20, self.num_epochs)

    def examples_a_step(self, num_examples: int) -> int:
        """Return the batch size asked for, or the default.

        Raises:
            UsageError: a step would take all examples, and have no noise.
            DataError: there is only one.
        """
        if num_examples < 2:
            raise DataError("fit-swag needs at least two training examples: its spread is the noise of minibatches")
        if self.batch_size is not None and self.batch_size >= num_examples:
            raise UsageError(
                f"\0batch_size\0: expected fewer than the {num_examples} examples, as SWAG's spread is the noise of minibatches; got {self.batch_size}"
            )
        return self.batch_size or max(1, min(128, num_examples // 4))
