"""Curvature of a network's target: each file is one structure of the generalised Gauss-Newton matrix (GGN) H.

H = sum_n J_n^T H_n J_n, where J_n (K, P) is the Jacobian of the logits in theta at example n and H_n the Hessian of
their likelihood. It equals the Hessian if the network is linear in theta, and is always positive semidefinite
(Schraudolph 2002; Martens 2020, arXiv:1412.1193). Files here compute H; `covariances` of the same name turn it into a
Gaussian covariance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from bnncli.targets.target import Curvature

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget


class NetworkCurvature(Curvature, Protocol):
    """What a file of this folder adds: its rank among the structures, and its cost."""

    order: ClassVar[int]
    """Sort key, from the structure that captures most of the posterior (lowest) to the least."""
    about: ClassVar[str]
    """A few words for `--help`; may be empty."""

    @staticmethod
    def one_block(target: NetworkTarget, theta: Tensor) -> object:
        """Run the work of `hessian` on one block of examples, to measure its cost, without what follows the sums.

        Optional if `hessian` is nothing but the sums.
        """

    @staticmethod
    def examples_at_once(target: NetworkTarget) -> int:
        """Return the number of examples in a block; optional, defaults to the target's."""

    begins_with: ClassVar[str]
    """Another structure, which `hessian` computes first; optional.

    The two costs are measured separately: their maximum grows with the number of examples like neither of them.
    """

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return the number of elements in one copy of the matrices of H and of the covariance."""
