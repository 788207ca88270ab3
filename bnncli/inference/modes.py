"""The mode of a target, by what suits it: Newton steps alone where the log posterior is concave, more care elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from bnncli.inference.climb import climb
from bnncli.inference.mode import Mode, find_mode
from bnncli.progress import SILENT, Progress
from bnncli.targets.target import CurvedTarget, UnevenTarget

if TYPE_CHECKING:
    from torch import Tensor


def mode_of(
    target: CurvedTarget,
    start: Tensor,
    *,
    tolerance: float | None = None,
    progress: Progress = SILENT,
    **known: Any,
) -> Mode:
    """The mode that start (P,) leads to, within `tolerance` posterior standard deviations, by default what suits the target.

    Args:
        known: of a concave target, what saves work: as of find_mode.

    Raises:
        NumericError: it was not found.
    """
    asked: dict[str, Any] = {} if tolerance is None else {"tolerance": tolerance}
    if target.is_concave:
        return find_mode(target, start, progress=progress, **asked, **known)
    return climb(cast(UnevenTarget, target), start, progress=progress, **asked)
