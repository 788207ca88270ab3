"""What tests of commands share: scores are made of few replicates and permutations, but where they are what is looked at."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def scores_are_rough(request: pytest.FixtureRequest) -> None:
    """Tests marked `sure_scores` look at how sure scores are."""
    if request.node.get_closest_marker("sure_scores") is None:
        request.getfixturevalue("rough_scores")
