"""What a command that is interrupted leaves of its features, for the next one to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bnncli.stages.extract_features.network import NetworkFeatures


@contextmanager
def unfinished_kept(network: _lru_cache_wrapper[NetworkFeatures]) -> Iterator[None]:
    """Around the work and its publication: what was not published stays where --resume finds it, and nothing else.

    Args:
        network: opens it when there is work for it, and knows then that it was.
    """
    try:
        yield
    finally:
        if network.cache_info().currsize:
            network().close()
    if network.cache_info().currsize:
        network().forget()
