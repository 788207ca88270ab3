"""Decide whether a fit takes place in the span of the features, and describe that it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.inference import structure_choice
from bnncli.parameters.layouts import HeadLayout, reduced_layout
from bnncli.session.inputs import Split
from bnncli.session.run import Run
from bnncli.system.memory import budget

if TYPE_CHECKING:
    from bnncli.posteriors.gaussian import Gaussian
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.row_space import RowSpace


def span_to_fit(run: Run, train: Split, *, structure: str = "auto", **sizes: Any) -> HeadLayout | None:
    """Return the largest layout of theta within the span of the features; None to fit all of theta.

    Args:
        structure: as requested; auto means full or block only if one of them can be fitted in the span.
        sizes: see memory.fit_bytes.
    """
    num_examples, num_features = train.content.features.shape
    if num_examples >= num_features or structure not in (
        "auto",
        *registry.list_declaring("curvature", "is_fitted_in_span"),
    ):
        return None
    span = reduced_layout(train.layout, num_examples)
    if structure == "auto":
        structure = structure_choice.automatic_structure(
            span, budget(run.device_name), device=run.device_name, whole=train.layout, **sizes
        )
    return span if registry.read_declared("curvature", structure, "is_fitted_in_span") else None


def span_of(meta: Mapping[str, Any]) -> HeadLayout | None:
    """Return the layout within the span of the features from a header; None for a fit of all of theta."""
    rank = meta.get("row_space_rank")
    return None if rank is None else reduced_layout(HeadLayout.from_meta(meta), int(rank))


def row_space(target: LastLayerTarget) -> RowSpace:
    """Return the span of a target's features, on the target's device."""
    from bnncli.targets.row_space import RowSpace

    return RowSpace.of(target.features.to(target.device), target.layout)


def span_metrics(gaussian: Gaussian) -> dict[str, int]:
    """Return rank and number of the features for a Gaussian fitted in their span; empty otherwise."""
    from bnncli.structures.row_space import rows_of

    within = rows_of(gaussian.covariance)
    if within is None:
        return {}
    return {"row_space_rank": within.rows.rank, "num_features": within.rows.layout.num_features}


def span_line(metrics: Mapping[str, Any]) -> list[str]:
    """Return `span_metrics` as a line for people."""
    rank = metrics.get("row_space_rank")
    if rank is None:
        return []
    reached = f"the training features span {rank:,} of {metrics['num_features']:,} directions"
    return [f"{reached}: the fit is exact in these directions, and all others keep the prior"]
