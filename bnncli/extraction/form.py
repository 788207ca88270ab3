"""How a head is taken from a network whose last step is not a plain torch.nn.Linear: where its features pass, how they become
one vector an example, and what the network does to the logits afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bnncli.errors import DataError
from bnncli.extraction.tape import Place, TappedInputs

SMALLEST_PROBABILITY = 1e-4  # below, and as near to one, float32 has too few digits for a logit


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=SMALLEST_PROBABILITY).log()


def _log_odds(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY).logit()


@dataclass(frozen=True)
class Link:
    """What a network does to logits (..., K), and the scale on which its output is compared with ours."""

    returns: str
    apply: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor] = lambda output: output


LINKS: Mapping[str, Link] = {
    "none": Link("logits", lambda logits: logits),
    "log_softmax": Link("log-probabilities (a log-softmax)", lambda logits: logits.log_softmax(-1)),
    "softmax": Link("probabilities (a softmax)", lambda logits: logits.softmax(-1), _log),
    "sigmoid": Link("probabilities (a sigmoid)", torch.sigmoid, _log_odds),
}


@dataclass(frozen=True)
class Tap:
    """Where features pass: a place at a module, or the number of an operation (`tap_number`) where none has them."""

    at: Place | int
    axis: int  # of the features


@dataclass(frozen=True)
class HeadForm:
    """How features and logits are found.

    Attributes:
        taps: their features lie side by side; without any the features are the output itself.
        positions: row: features are (n, D) as they are; all: everything of an example; mean: over its positions; one: the
            position that the network takes.
        output: which of the network's outputs the logits are, "" for its only one.
        link: of LINKS.
        reduce_range: where the head's product rounds its inputs to 8 bits, whether to 7 of them; else None.
        notes: what is to be said of it, a sentence each.
    """

    taps: tuple[Tap, ...]
    positions: str
    output: str
    link: str
    reduce_range: bool | None
    notes: tuple[str, ...]

    @property
    def changes_logits(self) -> bool:
        """Whether the network's output is not features times head, but what it makes of these."""
        return self.link != "none" or self.reduce_range is not None

    def on_link_scale(self, logits: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """What logits (..., K) would give and the network's output, to be compared."""
        link = LINKS[self.link]
        return link.scale(link.apply(logits)), link.scale(output)

    def run(self, model: nn.Module, call: Callable[[], Any]) -> tuple[list[Tensor], Any]:
        """What passes at each tap, and what the network returns, of one forward pass that `call` makes."""
        passed: dict[Tap, list[Tensor]] = {tap: [] for tap in self.taps}
        modules = dict(model.named_modules())
        hooks = [_hook(modules[tap.at.module], tap.at, passed[tap]) for tap in self.taps if isinstance(tap.at, Place)]
        numbers = [tap.at for tap in self.taps if isinstance(tap.at, int)]
        operations = TappedInputs(numbers)
        try:
            with operations if numbers else nullcontext():
                output = call()
        finally:
            for hook in hooks:
                hook.remove()
        return [_taken(tap, passed[tap], operations.found) for tap in self.taps], output

    def features(self, passed: list[Tensor], output: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Features (n, D), from what passed and the network's output (n, K).

        Args:
            weight, bias: of the head, (K, D) and (K,), on the device.
        """
        if not self.taps:
            return output
        every = [self._vectors(tensor, tap.axis) for tap, tensor in zip(self.taps, passed, strict=True)]
        if self.positions == "one":
            (vectors,) = every
            logits = vectors @ weight.T if bias is None else vectors @ weight.T + bias
            ours, theirs = self.on_link_scale(logits, output.unsqueeze(1))
            nearest = (ours - theirs).abs().amax(-1).argmin(1)
            places = nearest[:, None, None].expand(
                -1, -1, vectors.shape[2]
            )  # by no count of rows, which a graph would keep
            return vectors.gather(1, places)[:, 0]
        return every[0] if len(every) == 1 else torch.cat(every, 1)

    def _vectors(self, tensor: Tensor, axis: int) -> Tensor:
        """(n, D); (n, positions, D) where one of them is taken."""
        if self.positions == "row":
            return tensor
        if self.positions == "all":
            return tensor.reshape(
                tensor.shape[0], -1
            )  # len would fix the size of the batch where the network is exported
        vectors = tensor.movedim(axis, -1).flatten(1, -2)
        return vectors.mean(1) if self.positions == "mean" else vectors

    def rounded(self, features: Tensor) -> Tensor:
        """Features as the head's own product sees them: rounded as one batch where it works with 8 bits."""
        if self.reduce_range is None:
            return features
        scale, zero = torch._choose_qparams_per_tensor(features, self.reduce_range)
        return ((features / scale).round() + zero).clamp(0, 255).sub(zero).mul(scale)


def _hook(module: nn.Module, place: Place, passed: list[Tensor]) -> Any:
    if place.slot is None:
        return module.register_forward_hook(lambda module, args, output: passed.append(output))

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed.append(args[place.slot] if isinstance(place.slot, int) else kwargs[str(place.slot)])

    return module.register_forward_pre_hook(entering, with_kwargs=True)


def _taken(tap: Tap, passed: list[Tensor], operations: Mapping[int, Tensor]) -> Tensor:
    """The tensor at a tap. Raises DataError where the network did not come there."""
    if isinstance(tap.at, int) and tap.at in operations:
        return operations[tap.at]
    if isinstance(tap.at, Place) and tap.at.call < len(passed):
        return passed[tap.at.call]
    raise DataError(
        "the network runs different operations for these inputs than for the first ones, on which its head was found",
        code="not_the_head", hint="choose another layer with \0last_layer\0",
    )  # fmt: skip
