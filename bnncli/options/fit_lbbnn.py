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
        None, "Sizes of hidden layers, as 400,600; none by default: the last layer alone.", metavar="N,..."
    )
    estimator: str = option(
        "lrt",
        "How the bound is estimated: activations drawn from their mean and variance (lrt, the quickest), the same with "
        "every input's weights times a flow's draw (mnf), or weights with relaxed inclusions and a learnt "
        "prior (concrete).",
        choices=("lrt", "mnf", "concrete"),
    )
    epochs: int | None = option(
        None,
        "Passes over the training split; 250 by default with \0hidden\0, without it 60, or as many as make 6,000 steps.",
        minimum=1,
    )
    batch_size: int = option(100, "Examples a step, all where it is larger than the split.", minimum=1)
    learning_rate: float | None = option(
        None,
        "Learning rate of Adam; by default 0.01 without \0hidden\0, and with it the estimator's own (lrt 0.001, mnf and concrete 0.0001).",
        minimum=1e-12,
    )
    flow_rate: float | None = option(
        None,
        "Learning rate of the multipliers' flows (mnf); that of the rest by default, at most 0.001, for flows run away at higher "
        "ones. The thesis's simulation has 0.004, falling to 0.0004, beside 0.01.",
        minimum=1e-12,
    )
    schedule: str | None = option(
        None,
        "Course of the learning rate; constant by default with \0hidden\0, falling along a cosine without.",
        choices=("constant", "cosine"),
    )
    inclusion_rate: float | None = option(
        None,
        "Learning rate of the inclusion logits during \0early_epochs\0; the learning rate by default.",
        minimum=1e-12,
    )
    early_epochs: int | None = option(
        None,
        "Epochs with \0inclusion_rate\0, and in which concrete learns its prior; 20 by default, 0 to keep the prior as it is.",
        minimum=0,
    )
    variance: str | None = option(
        None,
        "Variance of a weight: exact by default, or published, alpha^2 sigma^2 (lrt, mnf), which leaves out that weights "
        "come and go: draws of the network, which predict takes, are then worse than its mean.",
        choices=("exact", "published"),
    )
    prior_inclusion: float = option(0.05, "Prior probability that a weight is in.", minimum=1e-9, maximum=1 - 1e-9)
    slab_mean: float = option(0.0, "Prior mean of a weight that is in.")
    slab_sd: str = option(
        "auto",
        "Prior standard deviation of a weight that is in: a number; auto is 1 with \0hidden\0 or without a labelled val split, "
        "and else what the val split prefers, found by a short fit of ten candidates at once.",
        metavar="NUMBER|auto",
    )
    bias_sd: float = option(1.0, "Prior standard deviation of the biases.", minimum=1e-9)
    start_inclusion: str = option("0,1", "Inclusion logits start uniformly between these.", metavar="LOW,HIGH")
    flow_length: int | None = option(None, "Coupling layers of each flow (mnf); 2 by default.", minimum=1)
    flow_hidden: str | None = option(
        None, "Hidden units of a coupling layer's network (mnf); 75,75,75,75 by default.", metavar="N,..."
    )
    multiplier_draws: int | None = option(
        None, "Draws of the multipliers a step (mnf), each for as many examples; 10 by default.", minimum=1
    )
    temperature: float | None = option(
        None,
        "Temperature of the relaxed inclusions (concrete); 0.5 by default. At 0.001, the thesis's, the inclusions get a "
        "gradient in about one draw of a thousand and learn next to nothing.",
        minimum=1e-6,
    )
    prior_weight: float | None = option(
        None,
        "Weight of \0prior_inclusion\0 and \0slab_sd\0 where concrete learns its prior, in times the layer's own weights; 10 by "
        "default. With 0, the thesis's Beta(1, 1), the prior goes where the inclusions start.",
        minimum=0.0,
    )
    repeats: int = option(
        1,
        "Networks fitted at once, from other starts and with other noise; predict's draws (mc) take them in turn, prune "
        "and the one-network integrators the one with the highest bound.",
        minimum=1,
    )
    standardize: bool = option(
        False, "Standardise the inputs by the training split; the posterior is for inputs as they are all the same."
    )
    no_shuffle: bool = option(False, "Take batches in the order of the data, without shuffling.")
    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every epoch.",
        minimum=0,
        numeric=False,
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
            raise UsageError(
                "\0early_epochs\0: nothing differs in them without \0inclusion_rate\0 or \0estimator\0 concrete"
            )

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
            raise UsageError(f"\0start_inclusion\0: expected LOW,HIGH, as 0,1; got {self.start_inclusion!r}")
        return low, high


def _sizes(flag: str, text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{flag}: expected sizes joined by commas, as 400,600; got {text!r}")
    return tuple(int(part) for part in parts)
