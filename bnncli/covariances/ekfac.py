"""The covariance in the eigenbasis of the Kronecker factors, with a diagonal fitted there; see `network_curvature.ekfac`."""

from __future__ import annotations

from typing import ClassVar

from bnncli.covariances._layers import EigenLayers


class Ekfac(EigenLayers):
    """A layer each; parameters that are no matrix have a diagonal."""

    structure: ClassVar[str] = "ekfac"
