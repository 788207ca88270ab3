"""A step that is taken many times on a GPU as one captured graph, so that no Python runs between its kernels.

Streams and graphs are made for the device that the tensors are on, whichever is current. Where there can be no graph the
steps go on one by one, and the reason is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Generic, Protocol, TypeVar

from bnncli.lazy import torch
from bnncli.training.optimizer import Optimizer

_WARM_UP_STEPS = 3  # that torch wants to see before a capture; they are ordinary steps
_REGISTERING_ENDS = "2.14"  # the release of torch from which graphs find the generators they draw from

Result = TypeVar("Result")


class Drawing(Protocol):
    """What draws random numbers in its steps. A capture that fails leaves it another generator, in the same state."""

    generator: torch.Generator


def num_updates(optimizer: Optimizer) -> int:
    """How many updates an optimizer has counted on the device."""
    return int(next(iter(optimizer.state.values()))["step"])


class StepGraph(Generic[Result]):
    """A step: run as it is at first, then replayed.

    Args:
        step: reads and writes tensors that stay where they are. What it returns in the capture, each replay overwrites.
        num_done: the steps that the device has counted, which each step adds to: it tells whether a replay did the step.
        device: of the tensors.
        warn: told once why there is no graph.
        drawing: whose generator, on the device, the step draws from; None when it draws nothing.
    """

    def __init__(
        self,
        step: Callable[[], Result],
        num_done: Callable[[], int],
        device: torch.device,
        *,
        warn: Callable[[str], None],
        drawing: Drawing | None = None,
    ) -> None:
        self.step, self.num_done, self.device, self.warn, self.drawing = step, num_done, device, warn, drawing
        self.is_refused = False
        self._captured: tuple[torch.cuda.CUDAGraph, Result] | None = None
        self._warm = 0

    def __call__(self) -> Result:
        """One step.

        Raises:
            torch.OutOfMemoryError: there is no memory for the graph.
        """
        with torch.cuda.device(self.device):
            if self._captured is not None:
                graph, result = self._captured
                graph.replay()
                return result
            if self.is_refused:
                return self.step()
            if self._warm < _WARM_UP_STEPS:
                self._warm += 1
                return self._beside()
            return self._first()

    def _beside(self) -> Result:
        """The step on the side stream."""
        here = torch.cuda.current_stream(self.device)
        side = _side_stream(here.device)
        side.wait_stream(here)
        with torch.cuda.stream(side), warnings.catch_warnings():
            # Optimizers that can be captured warn of a first step outside of a capture.
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True", UserWarning)
            result = self.step()
        here.wait_stream(side)
        return result

    def _first(self) -> Result:
        """The step by the first replay of a new graph; as it is where there is none, or where the replay did nothing."""
        before = self.num_done()
        captured = self._capture()
        if captured is None:
            return self.step()
        graph, result = captured
        is_recorded = self.num_done() == before  # a capture does not take the step, it writes it down
        graph.replay()
        is_done = self.num_done() > before
        if is_recorded and is_done:
            self._captured = captured
            return result
        self._refuse("the captured graph does nothing")
        return result if is_done else self.step()

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Result] | None:
        """The graph and what the step returned in it; None where some kernel cannot be captured."""
        here, random = torch.cuda.current_stream(self.device), None
        graph = torch.cuda.CUDAGraph()
        if self.drawing is not None:
            random = self.drawing.generator.get_state()
            if torch.torch_version.TorchVersion(torch.__version__) < _REGISTERING_ENDS:
                graph.register_generator_state(self.drawing.generator)
        stream = _side_stream(here.device)
        try:
            # Other threads may wait for the GPU meanwhile, as the one does that writes draws.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = self.step()
        except RuntimeError as error:
            torch.cuda.set_stream(here)  # torch 2.13 leaves that of the capture
            causes = _causes(error)
            for cause in causes:
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            torch.cuda.synchronize(self.device)
            if self.drawing is not None and random is not None:  # the old one still counts itself as captured
                self.drawing.generator = torch.Generator(self.device)
                self.drawing.generator.set_state(random)
            self._refuse(" ".join(str(causes[-1]).split())[:200])
            return None
        return graph, result

    def _refuse(self, why: str) -> None:
        self.is_refused = True
        self.warn(f"running steps one at a time, which is slower: cannot record them as a CUDA graph ({why})")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where all steps of a device warm up and are captured: memory that one stream has given back no other gets."""
    return torch.cuda.Stream(device)


def _causes(error: BaseException) -> list[BaseException]:
    """The error and those that it came of: the end of a capture fails as well when a kernel in it has."""
    found = [error]
    while (earlier := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(earlier)
    return found
