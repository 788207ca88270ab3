"""Scores of entities against the rules of conlleval, written out tag by tag, and against values of seqeval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from problems.command_line import Cli

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.entities import are_tags, entity_scores
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.statistics import ScoreGroup, compute_example_statistics, score_rows

Tags = Sequence[str]
Span = tuple[int, int, int, str]  # text, first and last token, type


def spans(texts: Sequence[Tags]) -> set[Span]:
    """The entities, by the rules for the beginning and the end of a chunk, one tag after another."""
    found = set()
    for number, tags in enumerate(texts):
        begin, before, kind_before = 0, "O", ""
        for place, tag in enumerate([*tags, "O"]):
            prefix, kind = tag[0].replace("L", "E").replace("U", "S"), tag[2:]
            differs = kind != kind_before
            ends = before in ("E", "S") or (before, prefix) in {(a, b) for a in "BI" for b in "BSO"}
            if before != "O" and (ends or differs):
                found.add((number, begin, place - 1, kind_before))
            starts = prefix in ("B", "S") or (before in ("E", "S", "O") and prefix in ("E", "I"))
            if prefix != "O" and (starts or differs):
                begin = place
            before, kind_before = prefix, kind
    return found


def expected(true: Sequence[Tags], predicted: Sequence[Tags], kind: str | None = None) -> list[float]:
    """F1, precision and recall, over all types or of one."""
    one, other = ({span for span in spans(side) if kind in (None, span[3])} for side in (true, predicted))
    if not one and not other:
        return [float("nan")] * 3
    common = len(one & other)
    return [2 * common / (len(one) + len(other)), common / max(1, len(other)), common / max(1, len(one))]


def scored(true: Sequence[Tags], predicted: Sequence[Tags], classes: Tags, order: NDArray | None = None) -> ScoreGroup:
    """The scores of texts whose tokens are rows, in this order, with their places as sample ids."""
    texts = np.repeat(np.arange(len(true)), [len(tags) for tags in true])
    order = np.arange(len(texts)) if order is None else order
    labels, found = (np.array([classes.index(tag) for tags in side for tag in tags]) for side in (true, predicted))
    examples = compute_example_statistics(np.eye(len(classes))[found[order]], labels[order])
    (group,) = entity_scores(examples, classes, RowGroups(texts[order]), order)
    return group


def value(group: ScoreGroup, size: int) -> NDArray:
    assert group.statistic is not None
    return group.statistic(np.ones((1, size)))[0]


SEQEVAL = [  # seqeval 1.2.2: f1_score, precision_score and recall_score with their defaults
    (["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "I-PER", "O", "B-PER"], (1 / 2, 1 / 2, 1 / 2)),
    (["I-PER", "I-PER", "I-LOC", "O"], ["B-PER", "I-PER", "B-LOC", "I-LOC"], (1 / 2, 1 / 2, 1 / 2)),
    (["O", "I-PER", "B-PER", "I-PER"], ["I-PER", "I-PER", "B-PER", "I-PER"], (1 / 2, 1 / 2, 1 / 2)),
    (["B-PER", "E-PER", "S-LOC", "O", "E-PER"], ["B-PER", "I-PER", "E-PER", "S-LOC", "E-PER"], (1 / 3, 1 / 3, 1 / 3)),
    (["B-PER", "I-LOC", "I-LOC", "E-LOC"], ["S-PER", "B-LOC", "I-LOC", "E-LOC"], (1, 1, 1)),
    (["O", "O"], ["O", "B-PER"], (0, 0, 0)),
]


@pytest.mark.parametrize(("true", "predicted", "scores"), SEQEVAL)
def test_scores_are_those_of_seqeval(true: Tags, predicted: Tags, scores: tuple[float, ...]) -> None:
    classes = sorted({*true, *predicted, "O"})
    assert value(scored([true], [predicted], classes), len(true)) == pytest.approx(scores)
    assert expected([true], [predicted]) == pytest.approx(scores)


@pytest.mark.parametrize("prefixes", ["I", "BI", "BIES", "BILU"])
def test_entities_of_random_tags_are_those_of_the_rules(prefixes: str) -> None:
    generator = np.random.default_rng(0)
    kinds = ["PER", "LOC", "X-Y"]
    classes = ["I-LOC", "O", *(f"{one}-{kind}" for kind in kinds for one in prefixes if (one, kind) != ("I", "LOC"))]
    for _ in range(40):
        true = [list(generator.choice(classes, size)) for size in generator.integers(1, 9, size=12)]
        predicted = [
            [tag if generator.random() < 0.7 else str(generator.choice(classes)) for tag in tags] for tags in true
        ]
        size = sum(map(len, true))
        group = scored(true, predicted, classes, generator.permutation(size))
        assert value(group, size) == pytest.approx(expected(true, predicted), nan_ok=True)
        assert group.per_class is not None
        of_tags = dict(zip(classes, zip(*group.per_class(), strict=True), strict=True))
        assert of_tags["O"] == (None, None, None)
        for tag in set(classes) - {"O"}:
            found = [np.nan if one is None else one for one in of_tags[tag]]
            assert found == pytest.approx(expected(true, predicted, tag[2:]), nan_ok=True)


def test_replicates_are_the_scores_of_the_drawn_texts() -> None:
    generator = np.random.default_rng(1)
    classes = ["O", "B-PER", "I-PER"]
    true = [list(generator.choice(classes, size)) for size in generator.integers(1, 9, size=20)]
    predicted = [list(generator.permutation(tags)) for tags in true]
    group, counts = scored(true, predicted, classes), generator.integers(0, 4, size=20)
    weights = np.repeat(counts, [len(tags) for tags in true])
    assert group.statistic is not None
    drawn = [
        [tags for tags, count in zip(side, counts, strict=True) for _ in range(count)] for side in (true, predicted)
    ]
    assert group.statistic(weights[None])[0] == pytest.approx(expected(*drawn))
    bootstrap = Bootstrap(200, groups={"test": RowGroups(np.repeat(np.arange(20), [len(tags) for tags in true]))})
    rows = score_rows([group], ("test", len(weights)), bootstrap)
    assert [row["name"] for row in rows] == ["entity_f1", "entity_precision", "entity_recall"]
    assert all(row["interval"]["num_groups"] == 20 for row in rows)


def test_nothing_but_tags_is_taken_for_tags() -> None:
    assert are_tags(["B-PER", "O", "I-PER"])
    assert are_tags(["O", "U-a b", "L-x"])
    for others in (["B-PER", "I-PER"], ["O"], ["O", "B-PER", "cat"], ["A", "B", "O"], ["O", "B-"], []):
        assert not are_tags(others)


def test_score_shows_them_for_tags_in_texts_alone(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    classes, generator = ["O", "B-PER", "I-PER"], np.random.default_rng(2)
    labels = generator.integers(3, size=60)
    lines = [",".join(["text", *(f"p_{name}" for name in classes), "label"])]
    for row, label in enumerate(labels):
        probs = np.full(3, 0.1)
        probs[label if row % 4 else 0] = 0.8
        lines.append(",".join([str(row // 6), *map(str, probs), classes[label]]))
    Path("p.csv").write_text("\n".join(lines))
    shown = cli("score", "p.csv:group=text", "--per-class").expect(0).stdout
    assert "entity F1" in shown.partition("\n")[0]
    assert "entity precision" in shown
    assert "entity F1" not in cli("score", "p.csv").expect(0).stdout
    cli("score", "p.csv", "--metric", "entity_recall").expect(
        65, "it needs classes such as B-PER, I-PER and O, and rows grouped by text"
    )
    cli("score", "p.csv:group=text", "--assert", "entity_f1-low>=0.2").expect(0)
