"""Logits under a diagonal in the eigenbasis of Kronecker factors; a network uses the code of the factors themselves."""

from __future__ import annotations

from bnncli.covariances import Covariance
from bnncli.logits import LogitCovariance
from bnncli.logits._pulled import pulled
from bnncli.logits.kron import blocks_of as blocks_of
from bnncli.logits.kron import network_root as network_root
from bnncli.parameters.layouts import HeadLayout


def of_head(covariance: Covariance, layout: HeadLayout) -> LogitCovariance:
    """Pull back through the features."""
    return pulled(covariance, layout.jacobian)
