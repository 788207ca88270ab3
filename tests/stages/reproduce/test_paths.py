"""Paths in documents: what they find, and what is said where they find nothing."""

from __future__ import annotations

import pytest

from bnncli.stages.reproduce.formulas import Unmeasured
from bnncli.stages.reproduce.paths import number_at, parts_of

DOCUMENT = {
    "metrics": {"elbo": {"value": -3.5}},
    "rows": [
        {
            "name": "la.mc",
            "split": "test",
            "metrics": [{"name": "nll", "value": 0.3}, {"name": "ece", "bins": 15, "value": 0.1}],
        },
        {
            "name": "hmc.mc",
            "split": "test",
            "metrics": [{"name": "mmd2", "value": None, "undefined": "it is the reference"}],
        },
    ],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metrics.elbo.value", -3.5),
        ("rows[0].metrics[1].value", 0.1),
        ("rows[name=la.mc,split=test].metrics[name=nll].value", 0.3),
        ("rows[name=la.mc].metrics[bins=15].bins", 15),
    ],
)
def test_a_path_leads_to_a_number(path: str, value: float) -> None:
    assert number_at(DOCUMENT, path) == value


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("rows[name=no].value", r"0 entries \[name=no\]"),
        ("rows[split=test].name", r"2 entries \[split=test\]"),
        ("rows[7].name", "no index 7"),
        ("metrics.no", "no key 'no'"),
        ("rows[0].name", "no number at"),
        ("rows[name=hmc.mc].metrics[0].value", "undefined: it is the reference"),
    ],
)
def test_where_there_is_no_number_it_is_said_why(path: str, match: str) -> None:
    with pytest.raises(Unmeasured, match=match):
        number_at(DOCUMENT, path)


@pytest.mark.parametrize("path", ["", "a..b", "a[", "a[x]", "a b", "[=1]"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parts_of(path)
