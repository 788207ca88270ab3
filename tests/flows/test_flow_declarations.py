"""What is told of a flow's layers without building one is what they are when built."""

from __future__ import annotations

from typing import Any

import pytest
from problems.flow_layers import LAYOUTS, every_flow, start_layer

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.flows import SPACES, Recipe, choose_recipe, choose_space, resolved_settings, settings_of
from bnncli.flows._affine_sizes import num_elements
from bnncli.options.declaration import class_attribute


@every_flow
@pytest.mark.parametrize("dim", [5, 30])
def test_settings_are_those_of_a_layer_that_is_built(kind: str, settings: dict[str, Any], dim: int) -> None:
    for given in (settings, {}):
        found = resolved_settings(kind, LAYOUTS[dim], **given)
        assert found == settings_of(start_layer(kind, dim, **given)), given
        assert found == settings_of(start_layer(kind, dim, **found))


@pytest.mark.parametrize("kind", registry.names("flows"))
def test_what_a_class_declares_is_read_without_it(kind: str) -> None:
    built = registry.load_class("flows", kind)
    for name in ("recipe", "settings", "spaces", "spaces_reason", "maps"):
        assert class_attribute("flows", kind, name) == getattr(built, name, None)
    assert isinstance(choose_recipe(kind), Recipe)
    assert choose_space(kind, "auto") in SPACES
    assert registry.has_attribute("flows", kind, "push_together") == hasattr(built, "push_together")


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("radial", {"rank": 2}, "\0rank\0: not supported by radial layers; supported by: affine, sylvester"),
        ("affine", {"rank": 2}, "\0rank\0: not supported with \0scale\0 kron; use \0scale\0 low-rank"),
        ("affine", {"scale": "low-rank", "rank": 31}, "\0rank\0: expected 1 to 30, the number of parameters; got 31"),
        ("sylvester", {"rank": 0}, "\0rank\0: expected 1 to 30, the number of parameters; got 0"),
    ],
)
def test_a_wrong_setting_is_told_alike_with_and_without_a_layer(kind: str, given: dict[str, Any], said: str) -> None:
    for use in (lambda: resolved_settings(kind, LAYOUTS[30], **given), lambda: start_layer(kind, 30, **given)):
        with pytest.raises(UsageError) as caught:
            use()
        assert caught.value.message == said


@pytest.mark.parametrize("scale", ["kron", "block", "low-rank"])
def test_an_affine_layer_has_as_many_numbers_as_are_told(scale: str) -> None:
    for dim in (5, 30, 850):
        layer = start_layer("affine", dim, scale=scale)
        assert num_elements(LAYOUTS[dim], scale) == sum(part.numel() for part in layer.parameters()), dim


@pytest.mark.parametrize("kind", registry.names("posteriors"))
def test_what_a_posterior_can_do_is_told_without_it(kind: str) -> None:
    built = registry.load_class("posteriors", kind)
    needs = ("center", "mean_theta", "sample", "quasi_noise", "log_density", "logit_moments", "logit_root", "absent")
    assert {need for need in needs if registry.has_attribute("posteriors", kind, need)} == {
        need for need in needs if hasattr(built, need)
    }
