"""The logits of a network linearised at theta: a layer at a time where Sigma has blocks, and through all of J where it has not."""

from __future__ import annotations

from torch import Tensor

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.logits import LogitCovariance
from bnncli.logits._by_layer import by_layer
from bnncli.logits.block import PulledBlock
from bnncli.theta.module import ModuleLayout


def network_spread(covariance: Covariance, layout: ModuleLayout, theta: Tensor) -> LogitCovariance:
    """J Sigma J^T at inputs (n, ...), J the logits' derivatives at theta (P,): the short way of the structure where it has one."""
    if covariance.structure in registry.names("logits"):
        module = registry.load_module("logits", covariance.structure)
        if hasattr(module, "of_network"):
            spread: LogitCovariance = module.of_network(covariance, layout, theta)
            return spread
    return by_layer(layout, theta, lambda places: [(slice(0, layout.num_params), PulledBlock(covariance))])
