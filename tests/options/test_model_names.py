"""What --model may be, told where it is none of it."""

from __future__ import annotations

import pytest

from bnncli.commands.extract_features import ExtractFeaturesOptions
from bnncli.errors import UsageError


def test_a_wrong_model_lists_networks_saved_models_and_factories() -> None:
    with pytest.raises(UsageError, match=r"expected one of flatten, lenet5.*hf:DIR.*file\.py:factory; got 'lenet'$"):
        ExtractFeaturesOptions(model="lenet", data=["train=npz:t.npz"])
