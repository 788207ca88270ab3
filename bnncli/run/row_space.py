"""When a fit runs in the row space of the training features, and that space.

A full Gaussian and one of blocks are the same there and over all of theta, for less work and memory. A Kronecker-factored
one is the same as well, and costs little anyway; a diagonal one would be another in another basis. Both stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.inference import memory
from bnncli.parameters.layouts import HeadLayout, reduced_layout
from bnncli.run.inputs import Split
from bnncli.run.session import Run
from bnncli.system.memory import budget

if TYPE_CHECKING:
    from bnncli.posteriors.gaussian import Gaussian
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.row_space import RowSpace


def span_to_fit(run: Run, train: Split, *, structure: str = "auto", **sizes: Any) -> HeadLayout | None:
    """The layout of theta inside the span of the features, as large as it can be; None to fit over all of theta.

    Args:
        structure: that was asked for; auto is full or block only where one of them can be fitted in the span.
        sizes: as for memory.fit_bytes.
    """
    num_examples, num_features = train.content.features.shape
    if num_examples >= num_features or structure not in ("auto", *registry.declaring("curvature", "is_fitted_in_span")):
        return None
    span = reduced_layout(train.layout, num_examples)
    if structure == "auto":
        structure = memory.automatic_structure(
            span, budget(run.device_name), device=run.device_name, whole=train.layout, **sizes
        )
    return span if registry.declared("curvature", structure, "is_fitted_in_span") else None


def span_of(meta: Mapping[str, Any]) -> HeadLayout | None:
    """The layout inside the span of the features of a posterior that was fitted there, by its header; None for all of theta."""
    rank = meta.get("row_space_rank")
    return None if rank is None else reduced_layout(HeadLayout.from_meta(meta), int(rank))


def row_space(target: LastLayerTarget) -> RowSpace:
    """The span of a target's features, on the device that it is computed on."""
    from bnncli.targets.row_space import RowSpace

    return RowSpace.of(target.features.to(target.device), target.layout)


def span_metrics(gaussian: Gaussian) -> dict[str, int]:
    """How many of how many directions the features span, where the Gaussian was fitted there; else nothing."""
    from bnncli.covariances._row_space import rows_of

    within = rows_of(gaussian.covariance)
    if within is None:
        return {}
    return {"row_space_rank": within.rows.rank, "num_features": within.rows.layout.num_features}


def span_line(metrics: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    rank = metrics.get("row_space_rank")
    if rank is None:
        return []
    reached = f"the training features span {rank:,} of {metrics['num_features']:,} directions"
    return [f"{reached}: the fit is exact in these directions, and all others keep the prior"]
