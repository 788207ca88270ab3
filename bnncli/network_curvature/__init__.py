"""Curvature of a whole network's target: each file is one structure of its H, the generalised Gauss-Newton matrix (GGN).

H = sum_n J_n^T H_n J_n, J_n (K, P) the logits' derivatives by theta at example n, H_n their likelihood's Hessian. It is the
Hessian where the network is linear in theta, and positive semidefinite everywhere (Schraudolph 2002; Martens 2020,
arXiv:1412.1193). Files here make H; `covariances` of the same name turn it into a Gaussian's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from bnncli.targets.target import Curvature

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget


class NetworkCurvature(Curvature, Protocol):
    """What a file of this folder has besides: its place among the others, and what it takes."""

    order: ClassVar[int]
    """Its place from the one that says most of the posterior (lowest) to the least."""
    about: ClassVar[str]
    """A few words for `--help`; may be empty."""

    @staticmethod
    def one_block(target: NetworkTarget, theta: Tensor) -> object:
        """The work of `hessian` on a target of one block of examples, to measure what it takes; not what is made of its sums.

        A structure may leave it out whose `hessian` is nothing else.
        """

    @staticmethod
    def examples_at_once(target: NetworkTarget) -> int:
        """Examples that a block of its work has; a structure may leave it out that has the target's own."""

    begins_with: ClassVar[str]
    """Another structure, which `hessian` makes first; a structure may leave it out that makes none.

    What each takes is measured on its own: the more of two that grow with the examples does not grow as either of them.
    """

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Numbers in one copy of the matrices of H, and of the covariance."""
