"""What holds while a posterior over other layers than the last is opened or predicts: its network may be the user's code."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from bnncli.opened.messages import exits_refused
from bnncli.system.devices import random_numbers_kept

if TYPE_CHECKING:
    from bnncli.artifacts.headers import Header
    from bnncli.run.predictor import Predictor


def is_of_network(header: Header) -> bool:
    """Whether the posterior with this header is over other layers than the last."""
    return header.meta.get("layers") is not None


def network_running(predictor: Predictor) -> AbstractContextManager[object]:
    """While a posterior over other layers is opened or predicts: its network may be the user's code. For others, nothing."""
    if not is_of_network(predictor.header):
        return nullcontext()
    found = ExitStack()
    found.enter_context(random_numbers_kept())
    found.enter_context(exits_refused())
    found.enter_context(predictor.train.reader.recorded.visible())
    return found
