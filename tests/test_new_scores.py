"""A score is one entry: one that a distribution adds is offered, computed, stored, shown, compared and asserted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copied_package import PACKAGE, run_with_files
from problems.command_line import Invocation
from sklearn.metrics import roc_auc_score

from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation import detectors
from bnncli.evaluation.scores import ScoreOption, all_scores, merge_options

pytestmark = pytest.mark.long  # copies the package and runs it; in `.ci/run`

SPHERICAL = '''"""The spherical score: the label's probability over the length of all of them."""

from bnncli.evaluation.scores import Score, ScoreOption


def of_split(split):
    from bnncli.evaluation.statistics import NO_LABELS, ScoreForm, ScoreGroup, means

    one, examples = ScoreForm("spherical", {"classes": "all"}, True, bounds=(0.0, 1.0)), split.examples
    if examples.label_probability is None:
        return [ScoreGroup([one], None, NO_LABELS)]
    return [means([one], [split.settings["stretch"] * examples.label_probability / examples.squared_norm**0.5])]


STRETCH = ScoreOption(text="Times the spherical score.", in_compare="Times it.", type=float, default=1.0, maximum=1)
SCORE = Score(
    title="spherical score",
    digits=5,
    is_shown=True,
    note="spherical: higher is better",
    options={"stretch": STRETCH},
    of_split=of_split,
)
'''
RECOGNISED = '''"""The share of out-of-distribution examples below the threshold of FPR95."""

from bnncli.evaluation.scores import Score


def of_two_splits():
    from bnncli.evaluation.detection import DetectionForm, fpr95_in

    return [DetectionForm({"positive": "in"}, lambda given: 1 - fpr95_in(given), higher_is_better=True)]


SCORE = Score(title="recognised", digits=2, told_by=("score",), of_two_splits=of_two_splits)
'''
LARGEST_SHIFT = '''"""The largest shift of a mean from the reference's."""

from bnncli.evaluation.scores import Score


def of_draws():
    from bnncli.evaluation.distances import Distance

    def measure(pair):
        ours, theirs = (side.center() for side in pair.sides)
        return [{"value": float((ours - theirs).abs().max()), "n": None}]

    return Distance([{"higher_is_better": False}], measure)


SCORE = Score(title="largest shift", of_draws=of_draws)
'''
CONCENTRATION = '''"""The sum of the squared class probabilities."""

from bnncli.evaluation.detectors import Detector

DETECTOR = Detector(of_predictions=lambda examples, values: examples.squared_norm)
'''
FEATURE_LENGTH = '''"""How much shorter features are than the longest of the training split."""

from bnncli.evaluation.detectors import Detector, FittedDetector
from bnncli.evaluation.scores import ScoreOption


def of_features(train):
    rows = train.features[: train.settings["first_rows"]]
    longest, notes = rows.norm(dim=1).max(), [f"\\0first_rows\\0: {len(rows)}"]
    return FittedDetector(lambda features: {"feature_length": longest - features.norm(dim=1)}, {"of": len(rows)}, notes)


ROWS = ScoreOption(text="Rows of feature_length.", default=1000, minimum=1)
DETECTOR = Detector(of_features=of_features, options={"first_rows": ROWS})
'''
MODULES = {
    ("detectors", "concentration"): CONCENTRATION,
    ("detectors", "feature-length"): FEATURE_LENGTH,
    ("scores", "spherical"): SPHERICAL,
    ("scores", "recognised"): RECOGNISED,
    ("scores", "largest-shift"): LARGEST_SHIFT,
}
ASSERTED = ("--assert", "spherical-low>=0.1", "--assert", "spherical<=0.1", "--assert", "recognised:far:combined>=0")


def install(folder: Path, modules: dict[tuple[str, str], str]) -> None:
    """Install a distribution `more-scores` in a folder of the search path: modules by family and name of the part."""
    metadata = folder / "more_scores-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: more-scores\nVersion: 1.0\n")
    points = []
    for (family, name), text in modules.items():
        stem = f"more_{name.replace('-', '_')}"
        (folder / f"{stem}.py").write_text(text)
        points.append(f"[bnncli.{family}]\n{name} = {stem}\n")
    (metadata / "entry_points.txt").write_text("".join(points))


def evaluate_help(folder: Path) -> subprocess.CompletedProcess[str]:
    """Ask for the help of evaluate with this folder on the search path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(folder)])}
    command = [sys.executable, "-m", "bnncli", "evaluate", "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture(scope="module")
def done(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Invocation]:
    """Run the command lines below beside a distribution with further scores."""
    folder = tmp_path_factory.mktemp("copy")
    run = folder / "small"
    shutil.copytree(finished_run.with_name("small.bnn"), folder / "small.bnn")
    own = ("--posterior", "laplace", "--bootstrap", 20, "--score", "concentration", "--score", "feature_length")
    chosen = [word for name in ("spherical", "recognised", "largest_shift") for word in ("--metric", name)]
    detected = ("--metric", "auroc:concentration")
    lines = (
        ("evaluate", "--help-all"),
        ("evaluate", run, *own, "--force", "--json"),
        ("evaluate", run, *own, *chosen),
        ("evaluate", run, *own, *ASSERTED),
        ("evaluate", run, *own),
        ("compare", run, "--metric", "spherical", "--metric", "recognised", *detected, "--bootstrap", 100, "--json"),
        ("compare", run, "--metric", "largest_shift"),
        ("evaluate", run, "--posterior", "hmc"),
        ("compare", "--help-all"),
        ("evaluate", run, *own, "--stretch", 0.5),
        ("evaluate", run, *own, "--stretch", 2),
        ("evaluate", run, *own, "--stretch", 0.5, "--first-rows", 100, "--force", "--json"),
        ("compare", run, "--metric", "spherical", "--stretch", 0.25, "--bootstrap", 100, "--json"),
    )
    install(folder, MODULES)
    return run_with_files({}, folder, lines)


@pytest.fixture
def spherical(finished_run: Path) -> float:
    """The spherical score of laplace on the test split, by its formula."""
    file = read_predictions(next(finished_run.with_name("small.bnn").glob("predictions/laplace.*/test.h5")))
    probs = np.asarray(file.probs, dtype=np.float64)
    assert file.labels is not None
    return float((probs[np.arange(len(probs)), file.labels] / np.linalg.norm(probs, axis=1)).mean())


def _side(row: dict[str, Any]) -> tuple[str, str]:
    return row.get("positive", "in"), row.get("score", "combined")


def test_a_new_score_is_offered_stored_and_read_back(done: list[Invocation], spherical: float) -> None:
    offered, made, again = done[0], done[1], done[2]
    assert "argmax_cost,largest_shift,recognised,spherical." in "".join(offered.stdout.split())
    assert made.code == 0, made.stderr
    metrics = made.json["rows"][0]["metrics"]
    found = {row["name"]: row for row in metrics if _side(row) == ("in", "combined")}
    assert found["spherical"]["value"] == pytest.approx(spherical, rel=1e-6)
    assert found["spherical"]["interval"]["low"] < spherical < found["spherical"]["interval"]["high"]
    assert found["recognised"]["value"] == pytest.approx(1 - found["fpr95"]["value"])
    assert found["largest_shift"]["value"] > 0
    assert "up to date" in again.stderr


def test_a_new_score_has_its_title_digits_and_note_in_the_table(done: list[Invocation], spherical: float) -> None:
    chosen, usual = done[2].stdout, done[4].stdout
    assert f"{spherical:.5f}" in chosen
    assert all(title in chosen for title in ("spherical score", "recognised far", "largest shift"))
    assert f"{spherical:.5f}" in usual
    assert "spherical: higher is better" in usual
    assert "recognised" not in usual


def test_a_new_score_of_examples_tells_splits_apart(done: list[Invocation], finished_run: Path) -> None:
    folder = next(finished_run.with_name("small.bnn").glob("predictions/laplace.*"))
    sides = [np.asarray(read_predictions(folder / f"{name}.h5").probs, dtype=np.float64) for name in ("test", "far")]
    values = np.concatenate([(probs**2).sum(axis=1) for probs in sides])
    expected = roc_auc_score(np.repeat([1, 0], [len(probs) for probs in sides]), values)
    own, features = (
        next(row for row in done[1].json["rows"] if row["posterior"] == name and row["split"] == "test")
        for name in ("laplace", "features")
    )
    areas = {row["score"]: row["value"] for row in own["metrics"] if row["name"] == "auroc"}
    assert areas["concentration"] == pytest.approx(expected, rel=1e-9)
    lengths = [row for row in features["metrics"] if row["score"] == "feature_length"]
    assert [row["of"] for row in lengths] == [240] * 6
    assert 0.5 < lengths[0]["value"] < 1
    assert "AUROC far concentration" in done[4].stdout
    assert "AUROC far feature_length" in done[4].stdout
    offered = "".join(done[0].stdout.replace("│", "").split())
    assert all(names in offered for names in ("max_logit,concentration,mahalanobis", "knn,feature_length,all."))


def test_metrics_made_before_there_was_the_score_are_not_up_to_date(done: list[Invocation]) -> None:
    assert done[7].code == 73
    assert "further_scores" in done[7].stderr


def test_a_new_score_can_be_asserted(done: list[Invocation], spherical: float) -> None:
    assert done[3].code == 3
    assert f"spherical of laplace (mc, test) is {spherical:.6g}, expected spherical<=0.1" in done[3].stderr
    assert "recognised" not in done[3].stderr
    assert "spherical-low" not in done[3].stderr


def test_a_new_score_is_compared_where_it_pairs(done: list[Invocation], spherical: float) -> None:
    assert done[5].code == 0, done[5].stderr
    row = next(row for row in done[5].json["rows"] if row["posterior"] == "laplace")
    found = {score["form"]: score for score in row["scores"]}
    assert list(found) == ["spherical", "recognised:far", "auroc:concentration:far"]
    assert found["auroc:concentration:far"]["integration_error"] > 0
    assert found["spherical"]["value"] == pytest.approx(spherical, rel=1e-6)
    assert found["spherical"]["integration_error"] > 0
    assert done[6].code == 2
    assert "unknown metric 'largest_shift'" in done[6].stderr


def test_a_new_score_is_set_by_an_option_of_its_own(done: list[Invocation], spherical: float) -> None:
    assert "--stretch" in done[0].stdout
    assert "Times the spherical score. [default: 1.0]" in " ".join(done[0].stdout.split())
    assert "Times it. [default: 1.0]" in " ".join(done[8].stdout.split())
    assert (done[9].code, "stretch: existing=1.0, requested=0.5" in done[9].stderr) == (73, True)
    assert (done[10].code, "--stretch: expected a number of at most 1; got 2.0" in done[10].stderr) == (2, True)
    rows = done[11].json["rows"]
    own = next(row for row in rows if row["posterior"] == "laplace" and row["split"] == "test")
    assert [m["value"] for m in own["metrics"] if m["name"] == "spherical"] == [pytest.approx(spherical / 2, rel=1e-6)]
    score = next(row for row in done[12].json["rows"] if row["posterior"] == "laplace")["scores"][0]
    assert score["value"] == pytest.approx(spherical / 4, rel=1e-6)
    assert score["integration_error"] > 0


def test_a_new_score_of_features_is_set_by_an_option_of_its_own(done: list[Invocation]) -> None:
    assert "--first-rows" in done[0].stdout
    assert "--first-rows" not in done[8].stdout
    rows = [row for row in done[11].json["rows"] if row["posterior"] == "features"]
    assert {m["of"] for row in rows for m in row["metrics"] if m["score"] == "feature_length"} == {100}
    assert "--first-rows: 100" in done[11].json["warnings"]


def test_scores_share_an_option_of_one_name() -> None:
    one = ScoreOption(text="Bins.", default=15)
    assert merge_options("scores", {"ece": {"bins": one}, "mce": {"bins": one}}) == {"bins": one}


def test_a_score_of_an_installed_distribution_is_offered(tmp_path: Path) -> None:
    install(tmp_path, {("scores", "round-score"): SPHERICAL})
    done = evaluate_help(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "argmax_cost,round_score." in "".join(done.stdout.split())


TAKEN = "bnncli has a built-in part with this name"
OTHER_OPTION = "its option bins differs from another score's option of the same name"


@pytest.mark.parametrize(
    ("family", "name", "text", "why"),
    [
        ("scores", "e-aurc", SPHERICAL, TAKEN),
        ("detectors", "max-logit", CONCENTRATION, TAKEN),
        ("scores", "round-score", SPHERICAL.replace('"stretch"', '"bins"'), OTHER_OPTION),
        # Sorted before the score whose option it has: still the installed one is to blame.
        (
            "scores",
            "round-score",
            SPHERICAL.replace('"stretch"', '"bins"').replace("digits=5", "place=0"),
            OTHER_OPTION,
        ),
    ],
    ids=["score", "detector", "option", "option-of-a-first-score"],
)
def test_an_installed_score_that_collides_is_refused(
    family: str, name: str, text: str, why: str, tmp_path: Path
) -> None:
    install(tmp_path, {(family, name): text})
    done = evaluate_help(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == (
        f"error: the part '{name}' of bnncli.{family} from the package 'more-scores' cannot be used: {why}"
    )


OF_TABLES = ("density", "true_positive_rate", "false_positive_rate")  # of evaluate's further tables
OF_RULES = (
    "set_coverage", "worst_class_coverage", "set_size", "empty_sets", "singleton_sets", "acceptance", "selective_risk",
    "false_alarm_rate", "detection_rate", "shift_p", "flagged", "flag_precision", "flag_recall",
    "decision_cost", "expected_cost", "argmax_cost",
)  # fmt: skip


def test_every_score_says_how_it_is_made_and_has_a_place_of_its_own() -> None:
    scores = all_scores()
    places = [score.place for score in scores.values()]
    assert places == sorted(set(places))
    for name, score in scores.items():
        hooks = (
            score.of_split,
            score.of_two_splits,
            score.of_other_split,
            score.of_draws,
            score.of_reference,
            score.computed_by,
        )
        told = sum(hook is not None for hook in hooks)
        assert score.definition.endswith("."), name
        assert told == (0 if name in (*OF_TABLES, *OF_RULES) else 1), name
        assert score.computed_by is None or scores[score.computed_by].of_split is not None, name


def test_every_score_of_examples_says_how_it_is_made() -> None:
    found = detectors.all_detectors()
    assert [one.place for one in found.values()] == list(range(1, len(found) + 1))
    for name, one in found.items():
        assert one.definition.endswith("."), name
        assert [one.of_predictions, one.of_features, one.computed_by].count(None) == 2, name
        assert (one.needs is None) == (one.without == ""), name
