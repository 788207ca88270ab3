"""The kind of second derivatives that a fit of a network uses, and how many of them the structures keep."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli import registry

GGN, HESSIAN, FISHER = KINDS = ("ggn", "hessian", "fisher")


DEFAULT_RANK = 50
DEFAULT_SIZE = 1000
RANKED = ("low-rank", "kron", "ekfac")  # structures of a network that keep a number of eigenvectors


@dataclass(frozen=True)
class CurvatureChoice:
    """The kind of H, and how much of it to keep.

    Args:
        kind: ggn, generalised Gauss-Newton matrix; hessian, all second derivatives; fisher, sum of outer products of
            each example's gradient at its label (empirical Fisher matrix).
        rank: eigenvectors kept by the structure low-rank, by default 50, and of each large Kronecker factor, by default all.
        size: parameters of the structure subnetwork.
    """

    kind: str = GGN
    rank: int | None = None
    size: int = DEFAULT_SIZE

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}; got {self.kind!r}")
        for name in ("rank", "size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @property
    def low_rank(self) -> int:
        """Return the number of eigenvectors of the structure low-rank."""
        return self.rank or DEFAULT_RANK


USUAL = CurvatureChoice()
STRUCTURE_FAMILIES = ("curvature", "network_curvature")  # of the last layer, of other layers


def structures_of(*, is_last_layer: bool) -> list[str]:
    """Return the structures of the last layer, or of other layers, the one closest to the posterior first."""
    return registry.in_order(STRUCTURE_FAMILIES[not is_last_layer])


def kinds_of(structure: str) -> tuple[str, ...]:
    """Return the kinds of curvature that a structure of a network supports; GGN alone if its file names none."""
    if registry.declaration_of("network_curvature", structure, "kinds") is None:
        return (GGN,)
    found: tuple[str, ...] = registry.read_declared("network_curvature", structure, "kinds")
    return found
