"""Networks that take several inputs by name, and texts through what a model brings for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.transforms import WordLengths
from problems.words_model import MeanOfWords

from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit, load_split
from bnncli.errors import DataError
from bnncli.models import features
from bnncli.models.features import collect, extract
from bnncli.models.head_search import find_head

TEXTS = ["a bb ccc", "dddd", "eeeee f", "a b c d e", "one two three four five six"]


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InputSplit:
    (tmp_path / "some_texts.py").write_text(f"def make(): return [(text, 1) for text in {TEXTS!r}]")
    monkeypatch.syspath_prepend(str(tmp_path))
    return load_split(f"py:{tmp_path / 'some_texts.py'}:make", preprocess=Preprocess(transform=WordLengths()))


def test_features_of_texts_are_those_of_a_plain_forward_pass(split: InputSplit) -> None:
    model = MeanOfWords().eval()
    head = find_head(model, lambda count: next(split.batches(count)).inputs)
    found = collect(extract(model, head, split, batch_size=2), len(split))
    ids = WordLengths()(TEXTS).inputs
    assert isinstance(ids, dict)
    inputs = {name: torch.from_numpy(array) for name, array in ids.items()}
    torch.testing.assert_close(found.features, model.pooled(**inputs).detach())
    torch.testing.assert_close(found.logits, model(**inputs).detach())
    assert found.labels is not None
    assert found.labels.tolist() == [1] * 5
    assert found.num_truncated == 2


def test_inputs_of_other_names_are_told_with_what_the_network_says(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", input_ids=np.ones((4, 3), int), token_types=np.ones((4, 3), int))
    split = load_split(f"npz:{tmp_path / 'a.npz'}:input_ids+token_types")
    with pytest.raises(DataError, match="unexpected keyword argument 'token_types'"):
        find_head(MeanOfWords(), lambda count: next(split.batches(2)).inputs)


def test_shapes_that_the_network_cannot_take_are_listed_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", input_ids=np.ones((4, 3), int), attention_mask=np.ones((4, 5)))
    split = load_split(f"npz:{tmp_path / 'a.npz'}:input_ids+attention_mask")
    with pytest.raises(DataError, match=r"inputs of shape \(2, 3\) \(input_ids\), \(2, 5\) \(attention_mask\): "):
        find_head(MeanOfWords(), lambda count: next(split.batches(2)).inputs)


class LastWord(MeanOfWords):
    """Takes the last position of all, a padded one as it may be."""

    def pooled(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)[:, -1]


@pytest.mark.parametrize(("network", "is_much"), [(MeanOfWords, False), (LastWord, True)])
def test_what_padding_changes_is_measured_on_the_most_padded_text(
    split: InputSplit, network: type[MeanOfWords], is_much: bool
) -> None:
    model = network().eval()
    head = find_head(model, lambda count: next(split.batches(count)).inputs)
    found = collect(extract(model, head, split, batch_size=3), len(split))
    inputs = next(split.batches(3)).inputs
    assert isinstance(inputs, dict)
    with torch.no_grad():
        alone = model.pooled(inputs["input_ids"][1:2, :1], torch.ones(1, 1))[0]  # "dddd", one word of at most three
    expected = float((found.features[1] - alone).abs().max() / alone.abs().max())
    assert found.padding == pytest.approx(expected, abs=1e-6)
    assert (found.padding > features.MUCH) == is_much
    whole = collect(extract(model, head, split.take(np.array([3])), batch_size=1), 1)
    assert whole.padding is None  # there is nothing to pad
