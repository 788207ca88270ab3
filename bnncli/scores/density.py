"""The share of a latent binary network's weights that are included."""

from __future__ import annotations

from bnncli.scores import Score

SCORE = Score(
    title="density",
    place=32,
    is_shown=True,
    usual={"kind": "used", "layer": "all"},
    told_by=("kind", "layer"),
    facts=("draws", "sd"),
    note="density: share of the weights included in the networks that predict (mc: on average)",
)
