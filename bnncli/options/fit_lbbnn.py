"""Options of fit-lbbnn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, option, parse_positive

# Learning rates of the thesis, by estimator, and of the inclusion logits in the first epochs.
LEARNING_RATES = {"lrt": 1e-3, "mnf": 1e-4, "concrete": 1e-4}
HEAD_RATE = 1e-2  # of a last layer alone, which the thesis does not have; falls along a cosine
HEAD_EPOCHS = 60
HEAD_STEPS = 6000  # and more epochs where they are fewer: after these the bound of 2,000 examples stood still
MEAN_RANGES = {"lrt": 0.2, "mnf": 0.01, "concrete": 0.2}
MAX_FLOW_RATE = 1e-3  # that flows keep to when nothing is said; at ten times as much their bound may run away
_ONLY = {
    "variance": ("lrt", "mnf"),
    "flow_length": ("mnf",),
    "flow_hidden": ("mnf",),
    "multiplier_draws": ("mnf",),
    "flow_rate": ("mnf",),
    "temperature": ("concrete",),
    "prior_weight": ("concrete",),
}
_DEFAULTS: dict[str, Any] = {
    "variance": "exact",
    "flow_length": 2,
    "flow_hidden": "75,75,75,75",
    "multiplier_draws": 10,
    "temperature": 0.5,
    "prior_weight": 10.0,
}


@dataclass(frozen=True)
class FitLbbnnOptions(Checked):
    """Options of fit-lbbnn."""

    hidden: str | None = option(
        None,
        "Sizes of the hidden layers, such as 400,600. Default: none, which fits the last layer.",
        metavar="N,...",
        group="Model",
    )
    estimator: str = option(
        "lrt",
        "Gradient estimator: local reparameterisation (lrt, fastest), lrt with multiplicative flows (mnf), or "
        "relaxed inclusions with a learned prior (concrete).",
        choices=("lrt", "mnf", "concrete"),
        group="Model",
    )
    epochs: int | None = option(
        None, "Passes over the training split. Default: 60 or more; with \0hidden\0 250.", minimum=1, group="Training"
    )
    batch_size: int = option(100, "Examples per step.", minimum=1, group="Training")
    learning_rate: float | None = option(
        None,
        "Learning rate of Adam. Default: 0.01; with \0hidden\0 0.001 (lrt) or 0.0001 (mnf, concrete).",
        minimum=1e-12,
        group="Training",
    )
    flow_rate: float | None = option(
        None,
        "Learning rate of the multiplier flows (mnf). Default: \0learning_rate\0, at most 0.001.",
        minimum=1e-12,
        group="Training",
        is_rare=True,
    )
    schedule: str | None = option(
        None,
        "Learning rate schedule. Default: cosine; with \0hidden\0 constant.",
        choices=("constant", "cosine"),
        group="Training",
        is_rare=True,
    )
    inclusion_rate: float | None = option(
        None,
        "Learning rate of the inclusion logits during \0early_epochs\0. Default: \0learning_rate\0.",
        minimum=1e-12,
        group="Training",
        is_rare=True,
    )
    early_epochs: int | None = option(
        None,
        "Number of epochs that use \0inclusion_rate\0 and, with concrete, learn the prior. Default: 20.",
        minimum=0,
        group="Training",
        is_rare=True,
    )
    variance: str | None = option(
        None,
        "Variance of a weight in lrt and mnf: exact, or as published (alpha^2 sigma^2), which ignores the "
        "inclusion noise.",
        choices=("exact", "published"),
        group="Training",
        is_rare=True,
    )
    prior_inclusion: float = option(
        0.05, "Prior probability that a weight is included.", minimum=1e-9, maximum=1 - 1e-9, group="Prior"
    )
    slab_mean: float = option(0.0, "Prior mean of an included weight.", group="Prior", is_rare=True)
    slab_sd: str = option(
        "auto",
        "Prior standard deviation of an included weight. auto is 1 with \0hidden\0, else chosen on val.",
        metavar="NUMBER|auto",
        group="Prior",
    )
    bias_sd: float = option(1.0, "Prior standard deviation of the biases.", minimum=1e-9, group="Prior", is_rare=True)
    start_inclusion: str = option(
        "0,1",
        "Range from which the initial inclusion logits are drawn uniformly.",
        metavar="LOW,HIGH",
        group="Training",
        is_rare=True,
    )
    flow_length: int | None = option(
        None, "Coupling layers per flow (mnf). Default: 2.", minimum=1, group="Training", is_rare=True
    )
    flow_hidden: str | None = option(
        None,
        "Hidden units of a coupling network (mnf). Default: 75,75,75,75.",
        metavar="N,...",
        group="Training",
        is_rare=True,
    )
    multiplier_draws: int | None = option(
        None, "Draws of the multipliers per step (mnf). Default: 10.", minimum=1, group="Training", is_rare=True
    )
    temperature: float | None = option(
        None,
        "Temperature of the relaxed inclusions (concrete). Default: 0.5.",
        minimum=1e-6,
        group="Training",
        is_rare=True,
    )
    prior_weight: float | None = option(
        None,
        "Weight of the priors \0prior_inclusion\0 and \0slab_sd\0 in concrete, relative to the layer's weights. "
        "Default: 10.",
        minimum=0.0,
        group="Training",
        is_rare=True,
    )
    repeats: int = option(
        1,
        "Number of networks to fit in parallel from different starts. mc averages over them; prune takes the "
        "one with the best bound.",
        minimum=1,
        group="Model",
    )
    standardize: bool = option(
        False,
        "Standardise the inputs with the training split's means and standard deviations. The stored posterior still takes unstandardised inputs.",
        group="Training",
    )
    no_shuffle: bool = option(False, "Take batches in the order of the data.", group="Training", is_rare=True)
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
        _ = self.hidden_sizes, self.start_logits  # wrong ones are told before any work
        _sizes("\0flow_hidden\0", self.flow_hidden)
        if self.slab_sd != "auto":
            parse_positive(self.slab_sd, "\0slab_sd\0", "auto or a positive number")
        for name, estimators in _ONLY.items():
            if getattr(self, name) is not None and self.estimator not in estimators:
                whose = " and ".join(estimators)
                raise UsageError(f"\0{name}\0 is for \0estimator\0 {whose}; the estimator is {self.estimator}")
        if self.early_epochs is not None and self.inclusion_rate is None and self.estimator != "concrete":
            raise UsageError("\0early_epochs\0 has no effect without \0inclusion_rate\0 or \0estimator\0 concrete")

    def resolved(self, num_examples: int) -> FitLbbnnOptions:
        """The options with the estimator's own choices in place of those that were left open."""
        chosen = {
            name: value
            for name, value in _DEFAULTS.items()
            if getattr(self, name) is None and self.estimator in _ONLY.get(name, (self.estimator,))
        }
        own_rate = LEARNING_RATES[self.estimator] if self.hidden_sizes else HEAD_RATE
        rate = chosen["learning_rate"] = self.learning_rate or own_rate
        enough = 250 if self.hidden_sizes else max(HEAD_EPOCHS, -(-HEAD_STEPS // -(-num_examples // self.batch_size)))
        chosen["epochs"] = self.epochs or enough
        chosen["schedule"] = self.schedule or ("constant" if self.hidden_sizes else "cosine")
        if self.estimator == "mnf":
            chosen["flow_rate"] = self.flow_rate or min(rate, MAX_FLOW_RATE)
        if self.inclusion_rate is not None or self.estimator == "concrete":
            chosen["early_epochs"] = 20 if self.early_epochs is None else self.early_epochs
        return replace(self, **chosen)

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Outputs of each hidden layer."""
        return _sizes("\0hidden\0", self.hidden)

    @property
    def flow_sizes(self) -> tuple[int, ...]:
        """Hidden units of the coupling layers' networks."""
        return _sizes("\0flow_hidden\0", self.flow_hidden)

    @property
    def start_logits(self) -> tuple[float, float]:
        """Between which inclusion logits start."""
        try:
            low, high = (float(part) for part in self.start_inclusion.split(","))
        except ValueError:
            low, high = 1.0, 0.0
        if not -80 <= low <= high <= 80:
            raise UsageError(f"\0start_inclusion\0: expected LOW,HIGH, such as 0,1; got {self.start_inclusion!r}")
        return low, high


def _sizes(flag: str, text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{flag}: expected sizes joined by commas, such as 400,600; got {text!r}")
    return tuple(int(part) for part in parts)
