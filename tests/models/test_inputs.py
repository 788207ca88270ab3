"""Repeated and named inputs of networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.transforms import WordLengths
from problems.words_model import MeanOfWords
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from bnncli.data.pixels import Preprocess
from bnncli.data.splits import Batch, InputSplit, load_split
from bnncli.errors import DataError
from bnncli.models import features as padding
from bnncli.models.features import check_repeats, collect, extract
from bnncli.models.head_search import find_head

pytestmark = pytest.mark.libraries


CODE = """import pathlib
from torch import nn
from torch.nn.functional import dropout

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(dropout(self.body(x), 0.5, pathlib.Path("random").exists()))
"""


class Net(nn.Module):
    """A body with a layer in it, and what forward does to the features."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), layer or nn.Tanh(), nn.Tanh())
        self.fc = nn.Linear(8, 3)

    def changed(self, features: Tensor) -> Tensor:
        return features

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.changed(self.body(x)))


class AlwaysDropout(Net):
    def changed(self, features: Tensor) -> Tensor:
        return dropout(features, 0.1, True)


class LeftInTraining(Net):
    def changed(self, features: Tensor) -> Tensor:
        self.train()
        return dropout(features, 0.1, self.training)


class RandomByNumpy(Net):
    def changed(self, features: Tensor) -> Tensor:
        return features + float(np.random.default_rng().normal())


class LessTheMean(Net):
    def changed(self, features: Tensor) -> Tensor:
        return features - features.mean(dim=0)


class Attends(Net):
    """The examples of a batch attend to each other."""

    def changed(self, features: Tensor) -> Tensor:
        return scaled_dot_product_attention(features[None], features[None], features[None])[0]


class TrainingModule(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.body[1].train()
        return super().forward(x)


PLAIN_NORM = nn.BatchNorm1d(8, track_running_stats=False)
RANDOM, BATCH = (
    "the network is random in evaluation mode",
    "in evaluation mode, an example's features depend on the rest of the batch",
)
REFUSED = {
    "functional dropout": (AlwaysDropout, RANDOM, "dropout in the network's forward method draws random numbers"),
    "train mode in forward": (LeftInTraining, RANDOM, "dropout in the network's forward method draws random numbers"),
    "a module in train mode": (
        lambda: TrainingModule(nn.Dropout(0.2)),
        RANDOM,
        r"dropout in 'body.1' \(Dropout in training mode\) draws",
    ),
    "numpy": (RandomByNumpy, RANDOM, "the forward pass is random"),
    "norm": (
        lambda: Net(PLAIN_NORM),
        BATCH,
        r"'body.1' \(BatchNorm1d without running statistics\) normalises with batch statistics",
    ),
    "norm in train mode": (
        lambda: TrainingModule(nn.BatchNorm1d(8)),
        BATCH,
        r"'body.1' \(BatchNorm1d in training mode\) normalises with batch statistics",
    ),
    "mean": (LessTheMean, BATCH, "the forward pass mixes the examples of a batch"),
    "attention": (Attends, BATCH, "the forward pass mixes the examples of a batch"),
}


@pytest.fixture
def split(tmp_path: Path) -> InputSplit:
    inputs = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=inputs, y=np.arange(40) % 3)
    return load_split(f"npz:{tmp_path / 'a.npz'}")


def run(model: nn.Module, split: InputSplit, batch_size: int) -> Tensor:
    first = next(split.batches(len(split))).inputs
    assert isinstance(first, Tensor)
    head = find_head(model, lambda count: first[:count])
    return collect(extract(model, head, split, batch_size=batch_size), len(split)).features


@pytest.mark.parametrize("batch_size", [2, 7, 512])
@pytest.mark.parametrize("kind", REFUSED)
def test_random_and_batch_dependent_networks_are_refused(kind: str, batch_size: int, split: InputSplit) -> None:
    make, told, cause = REFUSED[kind]
    with pytest.raises(DataError, match=f"{told}.*{cause}") as caught:
        run(make(), split, batch_size)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind not in ("mean", "attention")])
def test_they_are_refused_an_example_at_a_time_too(kind: str, split: InputSplit) -> None:
    make, told, cause = REFUSED[kind]
    with pytest.raises(DataError, match=f"{told}.*{cause}"):
        run(make(), split, 1)


def test_the_first_error_is_told_where_there_is_no_second_example() -> None:
    def first(count: int) -> Tensor:
        if count > 1:
            raise DataError("images have different sizes")
        return torch.ones(1, 5)

    with pytest.raises(DataError, match="failed on inputs of shape"):
        find_head(Net(), first)


@pytest.mark.parametrize("batch_size", [1, 7, 512])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8), nn.RReLU(), nn.LayerNorm(8)], ids=repr)
def test_layers_that_training_alone_makes_random_are_fine(layer: nn.Module, batch_size: int, split: InputSplit) -> None:
    model = Net(layer)
    inputs = next(split.batches(40)).inputs
    found = run(model, split, batch_size)
    torch.testing.assert_close(found, model.body(inputs).detach())


@pytest.mark.parametrize(("batch_size", "num_passes"), [(1, (3, 1, 1)), (40, (3, 3, 1))])
def test_a_network_is_checked_once_alone_and_once_in_a_batch(
    batch_size: int, num_passes: tuple[int, ...], split: InputSplit
) -> None:
    model, first = Net(), split.batches(40)
    inputs = next(first).inputs
    assert isinstance(inputs, Tensor)
    head, passes = find_head(model, lambda count: inputs[:count]), []
    model.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))
    few = split.take(np.arange(batch_size))
    for num_checked, num in enumerate(num_passes):
        passes.clear()
        collect(extract(model, head, few, batch_size=batch_size, num_checked=num_checked), batch_size)
        assert len(passes) == num + (
            batch_size == 1 and num_checked == 0
        )  # where one operation after another is looked at


@pytest.mark.parametrize(("dtype", "is_rounding"), [(torch.float32, False), (torch.bfloat16, True)])
def test_what_counts_as_rounding_depends_on_the_precision_of_the_weights(dtype: torch.dtype, is_rounding: bool) -> None:
    model, features = nn.Linear(2, 2).to(dtype), torch.ones(8, 2)
    shares = iter([1.0, 1.01])

    def read(inputs: object) -> tuple[Tensor, Tensor]:
        rows = torch.ones(len(inputs), 2) * next(shares, 1.0)  # type: ignore[arg-type]
        return rows, rows

    if is_rounding:
        check_repeats(model, read, Batch(torch.ones(8, 2), None), features)
        return
    with pytest.raises(DataError, match="differ by 1% between two passes"):
        check_repeats(model, read, Batch(torch.ones(8, 2), None), features)


def test_commands_refuse_a_network_that_has_become_random(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)
    pixels = np.random.default_rng(0).integers(256, size=(60, 4, 4), dtype=np.uint8)
    np.savez("data.npz", x=pixels, y=np.arange(60) % 3)
    torch.manual_seed(0)
    body, fc = nn.Sequential(nn.Flatten(), nn.Linear(16, 6)), nn.Linear(6, 3)
    state = {
        f"{name}.{key}": one for name, part in (("body", body), ("fc", fc)) for key, one in part.state_dict().items()
    }
    torch.save(state, "net.pt")
    extraction = ("extract-features", "net.pt", "--model", "net.py:Net", "--data", "train=npz:data.npz")
    assert cli(*extraction).code == 0
    assert cli("fit-laplace", "net.pt", "--prior-precision", 1).code == 0
    predicted = (
        "predict",
        "net.pt",
        "--posterior",
        "laplace",
        "--trust-code",
        "--data",
        "new=npz:data.npz",
        "--table",
        "t.csv",
    )
    assert cli(*predicted).code == 0
    Path("random").touch()
    for line in ((*extraction, "--force"), (*predicted, "--force")):
        done = cli(*line)
        assert done.code == 65
        assert "the network is random in evaluation mode" in done.stderr
        assert "pass training=self.training" in done.stderr


TEXTS = ["a bb ccc", "dddd", "eeeee f", "a b c d e", "one two three four five six"]


@pytest.fixture
def named_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InputSplit:
    (tmp_path / "some_texts.py").write_text(f"def make(): return [(text, 1) for text in {TEXTS!r}]")
    monkeypatch.syspath_prepend(str(tmp_path))
    return load_split(f"py:{tmp_path / 'some_texts.py'}:make", preprocess=Preprocess(transform=WordLengths()))


def test_features_of_texts_are_those_of_a_plain_forward_pass(named_split: InputSplit) -> None:
    model = MeanOfWords().eval()
    head = find_head(model, lambda count: next(named_split.batches(count)).inputs)
    found = collect(extract(model, head, named_split, batch_size=2), len(named_split))
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
    named_split = load_split(f"npz:{tmp_path / 'a.npz'}:input_ids+token_types")
    with pytest.raises(DataError, match="unexpected keyword argument 'token_types'"):
        find_head(MeanOfWords(), lambda count: next(named_split.batches(2)).inputs)


def test_shapes_that_the_network_cannot_take_are_listed_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", input_ids=np.ones((4, 3), int), attention_mask=np.ones((4, 5)))
    named_split = load_split(f"npz:{tmp_path / 'a.npz'}:input_ids+attention_mask")
    with pytest.raises(DataError, match=r"inputs of shape \(2, 3\) \(input_ids\), \(2, 5\) \(attention_mask\): "):
        find_head(MeanOfWords(), lambda count: next(named_split.batches(2)).inputs)


class LastWord(MeanOfWords):
    """Takes the last position of all, a padded one as it may be."""

    def pooled(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)[:, -1]


@pytest.mark.parametrize(("network", "is_much"), [(MeanOfWords, False), (LastWord, True)])
def test_what_padding_changes_is_measured_on_the_most_padded_text(
    named_split: InputSplit, network: type[MeanOfWords], is_much: bool
) -> None:
    model = network().eval()
    head = find_head(model, lambda count: next(named_split.batches(count)).inputs)
    found = collect(extract(model, head, named_split, batch_size=3), len(named_split))
    inputs = next(named_split.batches(3)).inputs
    assert isinstance(inputs, dict)
    with torch.no_grad():
        alone = model.pooled(inputs["input_ids"][1:2, :1], torch.ones(1, 1))[0]  # "dddd", one word of at most three
    expected = float((found.features[1] - alone).abs().max() / alone.abs().max())
    assert found.padding == pytest.approx(expected, abs=1e-6)
    assert (found.padding > padding.MUCH) == is_much
    whole = collect(extract(model, head, named_split.take(np.array([3])), batch_size=1), 1)
    assert whole.padding is None  # there is nothing to pad
