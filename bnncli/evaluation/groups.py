"""Groups of dependent rows, such as the tokens of a text or the visits of a patient: they are resampled and weighted as wholes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bnncli.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The groups of N rows.

    Args:
        index: (N,), the group of each row, from 0 to G - 1.
    """

    index: NDArray[np.int64]

    @classmethod
    def of(cls, groups: NDArray | None) -> RowGroups | None:
        """Number the groups of rows (N,) from 0; None without groups."""
        return None if groups is None else cls(np.unique(np.asarray(groups), return_inverse=True)[1].ravel())

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of rows (G,) of each group."""
        return np.bincount(self.index)

    def of_rows(self, rows: NDArray) -> RowGroups:
        """Return the groups of some rows (n,), which are those that have any of them."""
        return RowGroups(np.unique(self.index[rows], return_inverse=True)[1].ravel())

    def spread(self, weights: NDArray) -> NDArray:
        """Return weights (b, N) of rows from weights (b, G) of their groups."""
        spread: NDArray = weights.take(self.index, axis=-1)
        return spread

    def sums(self, values: NDArray) -> NDArray[np.float64]:
        """Return sums (G,) of values (N,) over the rows of each group."""
        found = np.zeros(len(self))
        np.add.at(found, self.index, values)
        return found

    def means(self, values: NDArray) -> NDArray[np.float64]:
        """Return means (G,) of values (N,) over the rows of each group."""
        return self.sums(values) / self.sizes

    def linearized(self, values: NDArray) -> NDArray[np.float64]:
        """Return G independent numbers whose mean is that of the values (N,), and their standard error that of the mean.

        Number g is m + (G / N) sum_(i in g) (v_i - m): the linearisation of a ratio of sums over groups (Cochran 1977,
        Sampling Techniques, section 9A.2).
        """
        mean = float(np.mean(values, dtype=np.float64))
        return mean + len(self) / len(self.index) * self.sums(np.asarray(values, dtype=np.float64) - mean)
