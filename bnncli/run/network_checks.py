"""Whether a network, as a function of its parameters, is the one that a run's features were made by, and can be differentiated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import BnnError, DataError
from bnncli.lazy import torch
from bnncli.names import listed
from bnncli.parameters.module import ModuleLayout
from bnncli.system.memory import give_back_freed

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 32  # examples whose logits are compared in one pass
TOLERANCE = 1e-3  # of logits, in units of 1 + the largest: what other block sizes and releases of torch change
_SAME = 1e-6  # of derivatives both ways, in float64, relative to what is summed
_STEP = 1e-4  # of parameters that seem to have no derivatives
AUTOCAST_TOLERANCE = 0.1  # where features were made in lower precision; here the network computes in float32


def check_logits(layout: ModuleLayout, inputs: Tensor, stored: NDArray, *, name: str, tolerance: float) -> None:
    """Pass when the network gives the logits that it gave extract-features.

    Args:
        layout: bound to the network.
        inputs: (N, D), of the split called `name`.
        stored: (n, K), the logits of its first examples.
        tolerance: of logits, in units of 1 + the largest.

    Raises:
        DataError: it gives others.
    """
    device = layout.trained().device
    theta = layout.trained().float().unsqueeze(0)
    with torch.no_grad():
        blocks = inputs[: len(stored)].split(_AT_ONCE)
        found = [layout.logits(block.to(device), theta)[0].cpu().double() for block in blocks]
    give_back_freed()
    ours, theirs = torch.cat(found).numpy(), np.asarray(stored, dtype=np.float64)
    if layout.likelihood.is_shift_invariant:  # a log-softmax has lost it
        ours, theirs = (one - one.mean(axis=1, keepdims=True) for one in (ours, theirs))
    error = float(np.abs(ours - theirs).max())
    if not error <= tolerance * (1 + float(np.abs(theirs).max())):
        raise DataError(
            f"the network's logits for split {name!r} differ by {error:.3g} from those stored with its features",
            code="stale_input",
            hint="extract the features again, with \0force\0",
        )


def check_derivatives(layout: ModuleLayout, inputs: Tensor) -> None:
    """Pass when the logits of a few inputs (n, D) depend on theta, and torch.func gives their derivatives both ways, in float64.

    Raises:
        DataError: they do not, something in the network has no derivative or no rule for vmap, or the derivatives differ; or a
            parameter moves logits that have no derivative by it, such as one whose outputs are detached.
    """
    with layout.briefly(torch.float64):
        _check_derivatives(layout, inputs)
    give_back_freed()


def _check_derivatives(layout: ModuleLayout, inputs: Tensor) -> None:
    theta = layout.trained()
    inputs = inputs.to(theta.device)
    numbers = torch.arange(1, len(theta) + 1, dtype=theta.dtype, device=theta.device)
    direction = numbers.sin()  # of no kind that a network's symmetries lose

    def of_all(one: Tensor) -> Tensor:
        return layout.logits(inputs, one.unsqueeze(0))[0]

    def pushed(example: Tensor) -> Tensor:
        def of_one(draw: Tensor) -> Tensor:
            return layout.logits(example.unsqueeze(0), draw.unsqueeze(0))[0]

        found: Tensor = torch.func.jvp(of_one, (theta,), (direction,))[1]
        return found

    try:
        with torch.no_grad():
            both = layout.logits(inputs, torch.stack([theta, theta + 1]))
        outputs, pull = torch.func.vjp(of_all, theta)[:2]
        back = (pull(torch.ones_like(outputs))[0] * direction).sum()
        forth = torch.func.vmap(pushed)(inputs)
    except (BnnError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the network is others' code: whatever it raises, it cannot be differentiated
        why = " ".join(str(error).split())[:160]
        raise _refused(f"it cannot be differentiated by torch.func ({type(error).__name__}: {why})") from error
    if not bool((back - forth.sum()).abs() <= _SAME * forth.abs().sum() + _SAME):
        raise _refused("its forward and backward derivatives differ: part of it changes only the gradients")
    if torch.equal(both[0], both[1]):
        raise _refused("its logits do not depend on these parameters")
    (gradient,) = pull(
        torch.arange(1, outputs.numel() + 1, dtype=theta.dtype, device=theta.device).cos().view_as(outputs)
    )
    still = [part for part in layout.parts if not gradient[part.place].any()]
    moved = theta.clone()
    for part in still:  # so little that a unit which is off stays off
        moved[part.place] += _STEP * direction[part.place]
    with torch.no_grad():
        change = (of_all(moved) - outputs).abs().max() if still else outputs.new_zeros(())
    if change > _SAME * _STEP * (1 + outputs.abs().max()):
        names = listed(part.name for part in still)
        raise _refused(
            f"changing {names} changes the network's logits, but their derivative is zero: part of the network "
            "is detached or rounds its values"
        )


def _refused(why: str) -> DataError:
    return DataError(f"\0layers\0: cannot fit a posterior over these parameters: {why}", code="not_differentiable")
