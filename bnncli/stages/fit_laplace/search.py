"""The examples by which fit-laplace searches for a prior precision over a last layer: all, or a part where all would take long."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bnncli.inference.prior_search import SearchRows, is_brief, search_rows
from bnncli.session.inputs import Split
from bnncli.session.run import Run
from bnncli.targets.last_layer import HeldOutFeatures, LastLayerTarget


class Searched(NamedTuple):
    """What a search is made of.

    Args:
        target, held_out: of the examples that it reads.
        counts: metrics that say how many these are, where they are not all.
        share: of the training examples that the target has.
        is_large: whether modes take so long that precisions far from the checkpoint's own are left out.
    """

    target: LastLayerTarget
    held_out: HeldOutFeatures | None
    counts: dict[str, int]
    share: float = 1.0
    is_large: bool = False

    @property
    def is_part(self) -> bool:
        """Whether the target is not of all examples."""
        return self.share < 1


def examples_to_search(
    run: Run, target: LastLayerTarget, held_out: HeldOutFeatures | None, val: Split | None, *, center: str
) -> Searched:
    """All examples, or a part, which is said; by the marginal likelihood, without held_out, all."""
    everything = Searched(target, held_out, {})
    if held_out is None or val is None:
        return everything
    sizes = {"train": target.num_examples, "val": len(val.stored)}
    rows = search_rows(
        sizes["train"],
        sizes["val"],
        num_params=target.layout.num_params,
        num_outputs=target.layout.num_outputs,
        device=target.device,
        generator=run.stream("fit-laplace/search"),
    )
    if center != "mode":  # no modes are searched for, and the one Hessian is that of all examples
        rows = replace(rows, train=None)
    counts = _counts(rows)
    if not counts:
        is_large = center == "mode" and is_brief(
            sizes["train"], num_params=target.layout.num_params, device=target.device
        )
        if is_large:
            run.console.info(
                "searching for the prior precision around the checkpoint's own, until the predictions get worse"
            )
        return everything._replace(is_large=is_large)
    said = " and ".join(f"{count:,} of {sizes[name]:,} examples of {name}" for name, count in counts.items())
    run.console.info(f"searching for the prior precision with {said}; the final fit uses all")
    return Searched(
        target if rows.train is None else target.some(rows.train),
        held_out if rows.val is None else target.held_out(val.stored[rows.val], val.labels(rows.val.device)[rows.val]),
        {f"prior_precision_{name}_examples": count for name, count in counts.items()},
        1.0 if rows.train is None else len(rows.train) / target.num_examples,
        is_large=True,
    )


def _counts(rows: SearchRows) -> dict[str, int]:
    parts = {"train": rows.train, "val": rows.val}
    return {name: len(part) for name, part in parts.items() if part is not None}
