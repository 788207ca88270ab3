"""fit-laplace searches by a rough structure first where the closest takes many times as long, and chooses as it would without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run

from bnncli.commands.fit_laplace import last_layer
from bnncli.inference import prior_search


@pytest.mark.parametrize(
    "problem", [make_arrays(), make_arrays(seed=3, num_classes=5, num_features=20)], ids=["3", "5"]
)
def test_the_choice_is_that_of_a_search_by_the_closest_structure(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: dict[str, Any]
) -> None:
    run = new_run(cli, tmp_path / "run", problem)
    plain = cli("fit-laplace", run, "--json").json["metrics"]
    searched: list[tuple[str, int]] = []
    search = prior_search.search

    def counted(*given: Any, **named: Any) -> Any:
        found = search(*given, **named)
        searched.append((named["structure"], len(found.curve)))
        return found

    monkeypatch.setattr(last_layer, "QUICK_SECONDS", 0.0)  # as if all searches were long
    monkeypatch.setattr(last_layer, "_DEARER", 0.0)
    monkeypatch.setattr("bnncli.commands.fit_laplace.last_layer.search", counted)
    found = cli("fit-laplace", run, "--name", "rough", "--json").json["metrics"]
    assert searched[0][0] != "full"
    assert found["structure"] == plain["structure"]
    assert found["prior_precision"] == pytest.approx(plain["prior_precision"], rel=0.1)
    assert found["val"]["laplace"]["nll"] == pytest.approx(plain["val"]["laplace"]["nll"], rel=1e-3)
    if found["structure"] == searched[0][0] or found["prior_precision_for"] == "plug-in":  # of which it says all
        assert len(searched) == 1
    else:  # around the rough one's, and not all over again
        assert [name for name, _ in searched[1:]] == [found["structure"]]
        assert searched[1][1] < len(plain["prior_precision_curve"])
