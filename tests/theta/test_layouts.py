"""What layouts of theta say of themselves."""

from __future__ import annotations

import pytest

from bnncli.parameters.layouts import ClassifierLayout, HeadLayout, NetworkLayout


@pytest.mark.parametrize(
    ("layout", "widest"),
    [
        (HeadLayout(10, 84), 10),
        (HeadLayout(1, 5), 2),  # its two classes
        (NetworkLayout((784, 400, 600, 10)), 600),
        (NetworkLayout((784, 3)), 3),  # inputs are there before
        (NetworkLayout((5, 1)), 2),
    ],
    ids=str,
)
def test_the_widest_place_is_a_layer_or_the_classes(layout: ClassifierLayout, widest: int) -> None:
    assert layout.widest == widest
