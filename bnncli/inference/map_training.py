"""MAP training of whole networks by log likelihood and weight decay; several networks train as one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.data.pixels import Augmentation
from bnncli.errors import NumericError
from bnncli.lazy import no_grad, torch
from bnncli.likelihoods import Likelihood
from bnncli.names import percent
from bnncli.training.loop import num_batches, steps_at_once
from bnncli.training.optimizers import Adam, Optimizer, Sgd

if TYPE_CHECKING:
    from torch import Tensor, nn


class StackedNetworks:
    """S networks of one architecture; if S > 1, their parameters and buffers are stacked.

    Args:
        modules: networks on one device; if there are several, they are copies until `separate`.
        logits_of: extracts the logits (n, K) from a network's output.

    Attributes:
        params: trainable parameters by name, each (S, ...), or unstacked for a single network.
    """

    def __init__(self, modules: Sequence[nn.Module], logits_of: Callable[[Any], Tensor]) -> None:
        self.modules, self.logits_of = list(modules), logits_of
        self._is_one = len(self.modules) == 1
        self._all: dict[str, Tensor] = dict(self.modules[0].named_parameters())
        self._stacked: dict[str, Tensor] = {}
        if not self._is_one:
            self._all, self._stacked = torch.func.stack_module_state(self.modules)
        self.params = {name: value for name, value in self._all.items() if value.requires_grad}

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers by name, each (S, ...), or unstacked for a single network; training changes them."""
        return dict(self.modules[0].named_buffers()) if self._is_one else self._stacked

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return logits (S, n, K) for inputs (S, n, ...), one slice per network."""
        if self._is_one:
            found: Tensor = self.logits_of(self.modules[0](inputs[0]))
            return found.reshape(len(found), -1).unsqueeze(0)
        stacked: Tensor = torch.vmap(self._one)(self._all, self._stacked, inputs)
        return stacked

    def _one(self, params: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        returned = torch.func.functional_call(self.modules[0], (params, buffers), (inputs,))
        found = self.logits_of(returned)
        return found.reshape(len(inputs), -1)

    @no_grad
    def separate(self) -> list[nn.Module]:
        """Return the networks with their current parameters and buffers."""
        if not self._is_one:
            for place, module in enumerate(self.modules):
                for own, stacked in ((module.named_parameters(), self._all), (module.named_buffers(), self._stacked)):
                    for name, value in own:
                        value.copy_(stacked[name][place])
        return self.modules

    def set_training(self, mode: bool) -> None:
        """Set training or evaluation mode (dropout, batch norm)."""
        for module in self.modules:
            module.train(mode)


_EVALUATED = 1000  # examples at once


class Examples(NamedTuple):
    """Inputs (N, ...) and labels, (N,) int64 or (N, L), on one device."""

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class MapSettings:
    """Training settings.

    Args:
        optimizer: one of bnncli.commands.train.OPTIMIZERS.
        momentum: of sgd and nesterov.
        weight_decay: of all parameters, added to the gradients; decoupled for adamw.
        batch_size: examples per step and network.
        label_smoothing: share of the label's probability that is spread over all classes.
        average: decay per step of the exponential moving average (EMA) of parameters and buffers; None for no average.
        augmentation: of the inputs, or None.
        autocast: data type of the forward pass; None for float32.
    """

    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    batch_size: int
    label_smoothing: float = 0.0
    average: float | None = None
    augmentation: Augmentation | None = None
    autocast: torch.dtype | None = None


class Streams(NamedTuple):
    """CPU random streams of one seed: order of the examples, and their augmentation."""

    order: torch.Generator
    augmentation: torch.Generator


@dataclass
class EpochScores:
    """Per epoch and network: loss and accuracy on the training batches as they came, and on val if given."""

    loss: list[list[float]] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)
    val_nll: list[list[float]] = field(default_factory=list)
    val_accuracy: list[list[float]] = field(default_factory=list)

    def last(self, network: int) -> dict[str, float]:
        """Return the scores of the last epoch, by name."""
        return {name: values[-1][network] for name, values in vars(self).items() if values}


class MapLearner:
    """S networks of one architecture that learn from the same examples.

    Args:
        networks: trained in place.
        train: on the networks' device.
        val: examples to evaluate after every epoch, or None.
        streams: random streams of each network's seed.
        generator: CPU generator for random layers of the networks (dropout).
        is_capturable: whether the network depends on nothing but its inputs and parameters.
        report: called after every epoch.
    """

    shuffles = False  # each network has its own order of batches
    draws_in_steps = False
    constants = None

    def __init__(
        self,
        networks: StackedNetworks,
        train: Examples,
        *,
        likelihood: Likelihood,
        settings: MapSettings,
        streams: Sequence[Streams],
        generator: torch.Generator,
        val: Examples | None = None,
        is_capturable: bool = False,
        report: Callable[[int, EpochScores], object] = lambda epoch, history: None,
    ) -> None:
        self.networks, self.train, self.val, self.likelihood = networks, train, val, likelihood
        self.settings, self.streams, self.generator, self.report = settings, streams, generator, report
        self.batch_size: int | None = min(settings.batch_size, self.num_examples)
        self.optimizer = _optimizer(settings, list(networks.params.values()), self.device)
        self.seen_shape: tuple[int, ...] = (len(networks), 2)
        self.is_capturable = is_capturable
        step_bytes = len(networks) * (self.batch_size or 1) * train.inputs[0].numel() * train.inputs.element_size()
        self.steps_at_once = steps_at_once(step_bytes, self.device, most=num_batches(self))
        self.history = EpochScores()
        self.averages = {name: one.detach().clone() for name, one in self._averaged().items()}
        self._order = self._drawn = torch.empty(0)

    @property
    def device(self) -> torch.device:
        """Device of the examples."""
        return self.train.inputs.device

    @property
    def num_examples(self) -> int:
        """Number of training examples, N."""
        return len(self.train.inputs)

    @property
    def num_epochs(self) -> int:
        """Number of epochs done."""
        return len(self.history.loss)

    @property
    def objective(self) -> Sequence[float]:
        """Minus the mean loss per epoch, nats per example."""
        return [-sum(losses) / len(losses) for losses in self.history.loss]

    def rates(self, epoch: int) -> Sequence[float]:
        """Return one learning rate for all parameters."""
        return (self.settings.learning_rate,)

    def note(self) -> str:
        """Return the first network's scores of the last epoch."""
        if not self.history.loss:
            return ""
        last = self.history.last(0)
        val = f", val {last['val_nll']:.4f}, {percent(last['val_accuracy'], '.2f')}" if "val_nll" in last else ""
        return f"loss {last['loss']:.4f}, accuracy {percent(last['accuracy'], '.2f')}{val}"

    def begin_epoch(self, order: Tensor | None) -> None:
        """Draw every network's order of the examples, their augmentation, and the seed of random layers."""
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=self.generator)))
        orders = [torch.randperm(self.num_examples, generator=one.order) for one in self.streams]
        self._order = torch.stack(orders).to(self.device)
        augmentation = self.settings.augmentation
        if augmentation is not None:
            drawn = [augmentation.draw(self.num_examples, one.augmentation) for one in self.streams]
            self._drawn = torch.stack(drawn).to(self.device)
        self.networks.set_training(True)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Return no draws; they are made once per epoch."""
        return ()

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """Return inputs (steps, S, B, ...), labels, and, if augmented, the drawn augmentation."""
        index = self._order[:, rows].unflatten(1, (num_steps, -1)).transpose(0, 1)
        found = (self.train.inputs[index], self.train.labels[index])
        if self.settings.augmentation is None:
            return found
        return (*found, self._drawn[:, rows].unflatten(1, (num_steps, -1)).transpose(0, 1))

    def update(self, *parts: Tensor) -> Tensor:
        """Update each network once; return the sum of its losses before and its number of correct predictions, (S, 2) float64."""
        inputs, labels, *drawn = parts
        settings = self.settings
        if settings.augmentation is not None:
            inputs = settings.augmentation.apply(inputs.flatten(0, 1), drawn[0].flatten()).unflatten(
                0, (len(inputs), -1)
            )
        with torch.autocast(
            self.device.type, dtype=settings.autocast, enabled=settings.autocast is not None, cache_enabled=False
        ):
            logits = self.networks(inputs)
        logits = logits.float()
        losses = self._losses(logits, labels)
        self.optimizer.zero_grad()
        losses.mean(dim=1).sum().backward()
        self.optimizer.step()
        self._average()
        hits = _hits(self.likelihood, logits.detach(), labels)
        return torch.stack([losses.detach().double().sum(dim=1), hits.double().sum(dim=1)], dim=1)

    def end_round(self, seen: Tensor) -> None:
        """Record the scores of each epoch of the round, and evaluate val.

        Raises:
            NumericError: a loss is not finite.
        """
        totals = (seen.sum(dim=1) / self.num_examples).cpu()  # (epochs, S, 2)
        for loss, accuracy in zip(totals[..., 0], totals[..., 1], strict=True):
            self.history.loss.append(loss.tolist())
            self.history.accuracy.append(accuracy.tolist())
            if not bool(torch.isfinite(loss).all()):
                raise NumericError(
                    f"the loss is not finite in epoch {self.num_epochs}",
                    hint=f"use a \0learning_rate\0 below {self.settings.learning_rate:g}",
                )
        if self.val is not None:
            scores = [
                evaluate(module, self.val, self.likelihood, self.networks.logits_of)
                for module in self.networks.separate()
            ]
            self.history.val_nll.append([nll for nll, _ in scores])
            self.history.val_accuracy.append([accuracy for _, accuracy in scores])
        self.report(self.num_epochs, self.history)

    def averaged(self) -> list[nn.Module]:
        """Return copies of the networks with their averaged parameters and buffers."""
        found = []
        for place, module in enumerate(self.networks.separate()):
            copy = deepcopy(module)
            own = {**dict(copy.named_parameters()), **dict(copy.named_buffers())}
            for name, value in self.averages.items():
                own[name].data.copy_(value if len(self.networks) == 1 else value[place])
            found.append(copy)
        return found

    def state(self) -> dict[str, Tensor]:
        """Return buffers, averages, random streams and the history."""
        found = {f"buffer.{name}": value.clone() for name, value in self.networks.buffers.items()}
        found |= {f"average.{name}": value.clone() for name, value in self.averages.items()}
        for place, one in enumerate(self.streams):
            found |= {f"stream.{place}.{name}": stream.get_state() for name, stream in one._asdict().items()}
        history = {name: torch.tensor(values, dtype=torch.float64) for name, values in vars(self.history).items()}
        return found | {f"history.{name}": values for name, values in history.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state."""
        for kind, own in (("buffer", self.networks.buffers), ("average", self.averages)):
            for name, value in own.items():
                value.copy_(state[f"{kind}.{name}"])
        for place, one in enumerate(self.streams):
            for name, stream in one._asdict().items():
                stream.set_state(state[f"stream.{place}.{name}"].cpu())
        self.history = EpochScores(**{name: state[f"history.{name}"].tolist() for name in vars(self.history)})

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return -log p of labels (S, n), smoothed if set, for logits (S, n, K)."""
        flat, target = logits.flatten(0, 1), labels.flatten(0, 1)
        found = -self.likelihood.log_likelihoods(flat.unsqueeze(0), target)[0]
        smoothing = self.settings.label_smoothing
        if smoothing:  # a share of each label is spread over all classes
            spread = -self.likelihood.log_class_probabilities(flat, dim=1).mean(dim=1)
            found = (1 - smoothing) * found + smoothing * spread
        return found.unflatten(0, (len(logits), -1))

    def _averaged(self) -> dict[str, Tensor]:
        """Return what is averaged: trainable parameters and floating-point buffers."""
        if self.settings.average is None:
            return {}
        buffers = {name: one for name, one in self.networks.buffers.items() if one.is_floating_point()}
        return {**self.networks.params, **buffers}

    @no_grad
    def _average(self) -> None:
        if self.settings.average is not None:
            torch._foreach_lerp_(
                list(self.averages.values()), list(self._averaged().values()), 1 - self.settings.average
            )


@no_grad
def evaluate(
    network: nn.Module, examples: Examples, likelihood: Likelihood, logits_of: Callable[..., Tensor]
) -> tuple[float, float]:
    """Return the mean negative log likelihood, nats per example, and the accuracy; leaves the network in evaluation mode."""
    network.eval()
    nll, hits = torch.zeros(2, dtype=torch.float64, device=examples.inputs.device)
    for inputs, labels in zip(examples.inputs.split(_EVALUATED), examples.labels.split(_EVALUATED), strict=True):
        logits = logits_of(network(inputs)).float().reshape(len(inputs), -1)
        nll -= likelihood.log_likelihoods(logits.unsqueeze(0).double(), labels).sum()
        hits += _hits(likelihood, logits.unsqueeze(0), labels.unsqueeze(0)).sum()
    return float(nll) / len(examples.inputs), float(hits) / len(examples.inputs)


def _hits(likelihood: Likelihood, logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether the most likely class is the label, (S, n); for multi-label, the share of right labels."""
    if not likelihood.is_exclusive:
        return ((logits > 0) == labels.bool()).float().mean(dim=-1)
    found = likelihood.class_logits(logits, dim=-1).argmax(dim=-1)
    return (found == labels).float()


def _optimizer(settings: MapSettings, params: Sequence[Tensor], device: torch.device) -> Optimizer:
    decay = settings.weight_decay
    if settings.optimizer in ("adam", "adamw"):
        return Adam([params], device, weight_decay=decay, is_decoupled=settings.optimizer == "adamw")
    is_nesterov = settings.optimizer == "nesterov"
    return Sgd([params], device, momentum=settings.momentum, is_nesterov=is_nesterov, weight_decay=decay)
