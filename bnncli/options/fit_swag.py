"""Options of fit-swag."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import DataError, UsageError
from bnncli.options.declaration import option
from bnncli.options.shared import GivenPriorOptions


@dataclass(frozen=True)
class FitSwagOptions(GivenPriorOptions):
    """Options of fit-swag."""

    warmup: int | None = option(
        None, "Epochs of SGD before collecting iterates. Default: 50; other layers 5.", minimum=0, group="Training"
    )
    epochs: int | None = option(
        None,
        "Number of epochs that contribute one iterate each. Default: 100; other layers 20.",
        minimum=2,
        group="Training",
    )
    rank: int | None = option(
        None,
        "Rank of the low-rank half of the covariance. Default: 20, or as many as there are iterates.",
        minimum=2,
        group="Training",
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: 128, or a quarter of a smaller split.", minimum=1, group="Training"
    )
    learning_rate: float | None = option(
        None,
        "Constant learning rate of SGD, which sets the spread. Default: the rate nearest to the posterior "
        "(Mandt et al., 2017).",
        minimum=1e-15,
        group="Training",
    )
    momentum: float = option(0.9, "Momentum of SGD.", minimum=0.0, maximum=0.999, group="Training", is_rare=True)
    scale: float = option(1.0, "Factor on the covariance.", minimum=1e-12, group="Training", is_rare=True)
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Training"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every epoch.",
        minimum=0,
        numeric=False,
        group="Training",
        is_rare=True,
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
            raise DataError("fit-swag needs at least two training examples: minibatch noise sets the spread")
        if self.batch_size is not None and self.batch_size >= num_examples:
            raise UsageError(
                f"\0batch_size\0: expected fewer than the {num_examples} examples, because minibatch noise sets "
                f"SWAG's spread; got {self.batch_size}"
            )
        return self.batch_size or max(1, min(128, num_examples // 4))
