"""The covariance with a diagonal fitted in the eigenbasis of Kronecker factors; see `network_curvature.ekfac`."""

from __future__ import annotations

from typing import ClassVar

from bnncli.covariances._layers import EigenLayers


class Ekfac(EigenLayers):
    """One block per layer; parameters that form no matrix have a diagonal."""

    structure: ClassVar[str] = "ekfac"
