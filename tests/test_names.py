"""Names of classes: each means one thing wherever it stands."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from bnncli.names import percent

PACKAGE = Path(__file__).parents[1] / "bnncli"


def classes() -> dict[str, list[Path]]:
    """The files that define each public class."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(PACKAGE))
    return found


def is_part(name: str, path: Path) -> bool:
    """Whether the class is the part of a family that its file is named after, as `Kron` of covariances/kron.py."""
    return "".join(word.capitalize() for word in path.stem.split("_")) == name


def test_the_name_of_a_class_means_one_thing() -> None:
    shared = {name: paths for name, paths in classes().items() if len(paths) > 1}
    # A structure is a file in curvature/, or network_curvature/, and one in covariances/; each names its class after it.
    assert {name for name, paths in shared.items() if not all(is_part(name, path) for path in paths)} == set()
    assert {path.parent.name for paths in shared.values() for path in paths} <= {
        "curvature",
        "network_curvature",
        "covariances",
    }


def test_a_split_is_held_as_inputs_as_features_or_as_predictions() -> None:
    found = {name for name in classes() if name.endswith("Split")}
    assert found == {"InputSplit", "Split", "NetworkSplit", "PredictedSplit"}  # the inputs in the place of features


def test_percentages_are_written_in_one_way() -> None:
    assert [percent(0.117), percent(1), percent(0.00123, ".2g"), percent(-0.5, "+.0f")] == [
        "11.7%",
        "100.0%",
        "0.12%",
        "-50%",
    ]
    otherwise = re.compile(r":[+.0-9]*%\}|\} %[^ ]")
    for path in PACKAGE.rglob("*.py"):
        found = otherwise.search(path.read_text())
        assert found is None, f"{path}: {found}"
