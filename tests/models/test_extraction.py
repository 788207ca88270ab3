"""Features from networks: data order, precision, parts of batches, repeats and links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.outputs import Told
from problems.transforms import WordLengths
from problems.words_model import MeanOfWords
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.commands.demo import fixture_path
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import Batch, Inputs, InputSplit, load_split
from bnncli.errors import DataError, NumericError, UsageError
from bnncli.models import features as features_module
from bnncli.models.build import load_network
from bnncli.models.checkpoints import load_checkpoint
from bnncli.models.features import (
    FeatureComputation,
    PrecisionLoss,
    check_repeats,
    collect,
    extract,
    padding_effect,
    track_batches,
)
from bnncli.models.head import Head, find_logits_before, head_of, prove_head, record_link_inputs
from bnncli.models.head_search import find_head
from bnncli.parameters.tensor_bytes import peak_bytes

pytestmark = pytest.mark.libraries


INPUTS = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))


class Classifier(nn.Module):
    """A body, a head declared before it, an unused linear layer declared last, and something after the head."""

    def __init__(self, after: Any = None, num_outputs: int = 3, has_bias: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.head = nn.Linear(4, num_outputs, bias=has_bias)
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        self.unused = nn.Linear(2, 2)
        self.after = after or (lambda logits: logits)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs: Tensor) -> Any:
        return self.after(self.head(self.body(inputs)))


@pytest.fixture
def split(tmp_path: Path) -> InputSplit:
    np.savez(tmp_path / "a.npz", x=INPUTS.numpy(), y=np.arange(10) % 3)
    return load_split(f"npz:{tmp_path / 'a.npz'}")


def find(model: nn.Module, inputs: Tensor) -> Head:
    return find_head(model, lambda count: inputs[:count])


def run(model: nn.Module, split: InputSplit, **options: Any) -> Any:
    head = find(model, next(split.batches(len(split))).inputs)
    return collect(extract(model, head, split, **options), len(split))


def test_the_linear_layer_that_is_called_last_is_found() -> None:
    assert find(Classifier(), INPUTS).name == "head"


@pytest.mark.parametrize("name", ["lenet5", "resnet20", "wide-resnet", "mlp"])
def test_the_head_of_every_built_in_network_is_found(name: str) -> None:
    shape = (2, 1, 28, 28) if name in ("lenet5", "mlp") else (2, 3, 32, 32)
    expected = {"resnet20": "linear", "wide-resnet": "fc"}.get(name, "ll")
    head = find(load_network(name, {}, None), torch.rand(shape))
    assert (head.name, head.form) == (expected, None)


def test_a_network_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(DataError, match=r"calls no linear layer \(torch.nn.Linear\); it has none"):
        find(nn.Sequential(nn.Flatten(), nn.ReLU()), torch.rand(2, 1, 2, 2))


def test_an_unknown_last_layer_lists_the_linear_layers() -> None:
    with pytest.raises(UsageError, match=r"expected one of 'head', 'body.0', 'unused'; got 'fc'"):
        head_of(Classifier(), "fc")


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("batch_size", [3, 10])
def test_features_logits_and_labels_are_those_of_a_plain_forward_pass(
    split: InputSplit, has_bias: bool, batch_size: int
) -> None:
    model = Classifier(has_bias=has_bias)
    found = run(model, split, batch_size=batch_size)
    assert not model.training
    torch.testing.assert_close(found.features, model.body(INPUTS).detach())
    torch.testing.assert_close(found.logits, model(INPUTS).detach())
    assert found.labels.tolist() == [row % 3 for row in range(10)]
    assert not found.features.is_inference()


@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_logits_are_made_and_copied_of_the_first_rows_alone(split: InputSplit, autocast: str | None) -> None:
    model = Classifier(lambda logits: logits.log_softmax(1))
    head = find(model, INPUTS)

    def rows(first_row: int, num_logits: int) -> list[int]:
        batches = extract(
            model, head, split, batch_size=4, first_row=first_row, num_logits=num_logits, autocast=autocast
        )
        return [0 if one.logits is None else len(one.logits) for one in batches]

    assert [rows(0, 5), rows(4, 5), rows(0, 0), rows(0, 20)] == [[4, 1, 0], [1, 0], [0, 0, 0], [4, 4, 2]]
    kept = collect(extract(model, head, split, batch_size=4, num_logits=5), len(split))
    torch.testing.assert_close(kept.logits, model.head(model.body(INPUTS[:5])).detach())


def test_the_head_is_a_copy_with_its_layout() -> None:
    model = Classifier()
    head = head_of(model, "head")
    assert head.bias is not None
    assert torch.equal(head.weight, model.head.weight.detach())
    assert head.weight.data_ptr() != model.head.weight.data_ptr()
    assert (head.layout.num_outputs, head.layout.num_features, head.layout.has_bias) == (3, 4, True)


def test_a_network_without_a_head_gives_its_output_as_features(split: InputSplit) -> None:
    found = collect(extract(load_network("flatten", {}, None), None, split, batch_size=4), 10)
    assert torch.equal(found.features, INPUTS)
    assert found.logits is None


def test_an_unlabelled_split_gives_no_labels(split: InputSplit) -> None:
    assert run(Classifier(), split.as_ood()).labels is None


def test_a_single_logit_may_come_without_its_axis(split: InputSplit) -> None:
    binary = replace(split, rows=torch.tensor([0, 1, 3, 4]))
    found = run(Classifier(lambda logits: logits.squeeze(1), num_outputs=1), binary)
    assert found.logits.shape == (4, 1)


WRAPPED_OUTPUTS = {
    "tuple": lambda logits: (logits, "other"),
    "mapping": lambda logits: {"logits": logits},
    "object": lambda logits: type("Output", (), {"logits": logits})(),
}


@pytest.mark.parametrize("kind", WRAPPED_OUTPUTS)
def test_logits_are_found_in_the_usual_wrappings(split: InputSplit, kind: str) -> None:
    plain, wrapped = run(Classifier(), split), run(Classifier(WRAPPED_OUTPUTS[kind]), split)
    assert torch.equal(wrapped.logits, plain.logits)


AFTER_THE_HEAD = {
    "the output is the ReLU": lambda logits: logits.relu(),
    "the output is the logits minus their mean": lambda logits: logits - logits.mean(1, keepdim=True),
    "another operation follows that layer": lambda logits: logits.exp(),
    r"shape \(10, 2\), but its linear layer 'head' gives \(10, 3\)": lambda logits: logits[:, :2],
}


@pytest.mark.parametrize("message", AFTER_THE_HEAD)
def test_what_comes_after_the_head_is_told(split: InputSplit, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(Classifier(AFTER_THE_HEAD[message]), split)


def test_the_tolerance_of_the_proof_is_a_thousandth_of_the_logits() -> None:
    features = torch.tensor([[1.0, 2.0]])
    head = Head("head", torch.tensor([[3.0, 4.0]]), None)
    prove_head(head, features, torch.tensor([[11.011]]))
    with pytest.raises(DataError, match=r"differ from the network's output by 0.013"):
        prove_head(head, features, torch.tensor([[11.013]]))


def test_naming_a_layer_that_is_not_the_last_is_refused(split: InputSplit) -> None:
    model = Classifier()
    with pytest.raises(DataError, match="that layer is not the last step"):
        collect(extract(model, head_of(model, "body.0"), split), 10)
    with pytest.raises(DataError, match="is called 0 times"):
        collect(extract(model, head_of(model, "unused"), split), 10)


def test_a_head_that_is_called_twice_is_refused(split: InputSplit) -> None:
    model = Classifier()
    model.after = lambda logits: model.head(torch.ones(10, 4))
    with pytest.raises(DataError, match="is called 2 times"):
        run(model, split)


def test_one_vector_for_each_position_is_refused(split: InputSplit) -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 3)})
    model.forward = lambda inputs: model["head"](inputs.view(-1, 3, 2))
    with pytest.raises(DataError, match=r"input of the last layer has shape \(10, 3, 2\), expected \(N, D\)"):
        run(model, split)


def test_a_feature_that_is_not_finite_is_counted_and_its_row_named(split: InputSplit) -> None:
    model = Classifier()
    model.body = nn.Sequential(nn.Linear(6, 4))
    split.dataset.inputs[7, 2] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"split test: 4 feature values .* the first is in row 7"):
        run(model, replace(split, name="test"), batch_size=3)


def test_large_finite_features_are_not_mistaken_for_infinite_ones(split: InputSplit) -> None:
    split.dataset.inputs[:] = 3e38  # type: ignore[attr-defined]
    found = collect(extract(nn.Flatten(), None, split), 10)
    assert torch.isfinite(found.features).all()


def test_a_label_beyond_the_head_is_named_with_its_row(split: InputSplit) -> None:
    with pytest.raises(DataError, match=r"row 5 has label 2, but the head has classes 0 to 1"):
        run(Classifier(num_outputs=2), replace(split, rows=torch.tensor([0, 1, 3, 4, 0, 5])), batch_size=4)


def test_half_precision_features_are_rounded_and_their_range_is_checked(split: InputSplit) -> None:
    model = Classifier()
    found = run(model, split, dtype=torch.float16)
    assert torch.equal(found.features, model.body(INPUTS).detach().half())
    split.dataset.inputs[9, 0] = 1e5  # type: ignore[attr-defined]
    with pytest.raises(NumericError, match=r"1e\+05, which exceeds 6.55e\+04, the maximum of float16"):
        collect(extract(nn.Flatten(), None, split, dtype=torch.float16), 10)


class Narrow(nn.Module):
    """Takes 5 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(inputs)
        return logits


def test_inputs_that_the_network_cannot_take_are_reported_with_their_shape(split: InputSplit) -> None:
    with pytest.raises(DataError, match=r"failed on inputs of shape \(10, 6\):"):
        collect(extract(Narrow(), head_of(Narrow(), "head"), split), 10)


def test_a_network_that_returns_no_tensor_is_refused(split: InputSplit) -> None:
    with pytest.raises(DataError, match="returned str, expected a tensor of logits"):
        run(Classifier(lambda logits: "class 3"), split)


def test_progress_counts_every_example(split: InputSplit) -> None:
    split, told = replace(split, name="val"), Told()
    for first_row in (0, 4):
        batches = extract(Classifier(), None, split, batch_size=4, first_row=first_row)
        list(track_batches(batches, split, first_row=first_row, progress=told))
    assert told.tasks == [("extract val", 10)] * 2
    assert told.steps == [4, 4, 2] * 2


@pytest.mark.parametrize(("first_row", "num_workers"), [(0, 0), (3, 0), (0, 1)])
def test_batches_in_turns_are_those_of_all(split: InputSplit, first_row: int, num_workers: int) -> None:
    model = Classifier()
    head = find(model, INPUTS[:1])
    options: dict[str, Any] = {"batch_size": 2, "first_row": first_row, "num_logits": 5, "num_workers": num_workers}
    whole = list(extract(model, head, split, **options))
    read = []
    for turn in range(3):
        parts = list(extract(model, head, split, **options, turns=slice(turn, None, 3)))
        assert len(parts) == len(whole[turn::3])
        for part, expected in zip(parts, whole[turn::3], strict=True):
            read += part.labels.tolist()  # type: ignore[union-attr]
            assert torch.equal(part.features, expected.features)
            assert (part.logits is None) == (expected.logits is None)
    assert sorted(read) == sorted((np.arange(10) % 3)[first_row:].tolist())
    assert [one.logits is not None for one in whole] == [first_row + 2 * place < 5 for place in range(len(whole))]


def test_an_error_in_turns_names_the_row_of_the_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x=INPUTS.numpy(), y=np.array([0, 1, 2, 0, 1, 2, 0, 9, 1, 2]))
    bad = load_split(f"npz:{tmp_path / 'b.npz'}")
    model = Classifier()
    head = find(model, INPUTS[:1])
    assert len(list(extract(model, head, bad, batch_size=2, turns=slice(0, None, 2)))) == 3
    with pytest.raises(DataError, match="row 7 has label 9"):
        list(extract(model, head, bad, batch_size=2, turns=slice(1, None, 2)))


def test_only_the_first_two_batches_of_all_prove_the_head(split: InputSplit) -> None:
    model = Classifier()
    head = find(model, INPUTS[:1])
    wrong = replace(head, weight=head.weight + 1)
    for turns in (slice(0, None, 3), slice(1, None, 3)):
        with pytest.raises(DataError, match="differ from the network's output"):
            list(extract(model, wrong, split, batch_size=2, turns=turns))
    assert len(list(extract(model, wrong, split, batch_size=2, turns=slice(2, None, 3)))) == 1


def test_the_fixture_pipeline_gives_the_networks_own_predictions() -> None:
    network = load_network("lenet5", {}, load_checkpoint(fixture_path("lenet5-fmnist.pt")).state)
    split = load_split(f"npz:{fixture_path('val.npz')}")
    head = find(network, next(split.batches(1)).inputs)
    found = collect(extract(network, head, split, batch_size=256), len(split))
    assert found.logits is not None
    np.testing.assert_allclose(found.features @ head.weight.T + head.bias, found.logits, atol=1e-4)
    assert found.features.shape == (1000, 84)


def test_a_network_whose_forward_raises_is_the_users_error() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.no_such_method()

    with pytest.raises(DataError, match="the network raised AttributeError") as caught:
        find(Broken(), torch.zeros(1, 2))
    assert caught.value.code == "user_code"


NETWORK = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, {k}))\n"


def network(classes: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, classes)).eval()


@pytest.fixture(params=[3, 1])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK.format(k=request.param))
    rng = np.random.default_rng(1)
    np.savez("train.npz", x=rng.normal(size=(300, 4)).astype("f4"), y=rng.integers(2, size=300))
    torch.save(network(request.param).state_dict(), "net.pt")
    return network(request.param)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_features_are_those_of_autocast_and_the_difference_is_said(
    cli: Cli, model: nn.Sequential, name: str, dtype: torch.dtype
) -> None:
    words = ("extract-features", "net.pt", "--model", "net.py:make", "--data", "train=npz:train.npz")
    done = cli(*words, "--autocast", name)
    assert done.code == 0, done.stderr
    stored = read_features(Path("net.pt.bnn/features/train.h5"))
    inputs = torch.from_numpy(np.load("train.npz")["x"])
    with torch.inference_mode():
        exact = model(inputs[:256]).double()
        with torch.autocast("cpu", dtype=dtype):
            features = model[:2](inputs).float()
        logits = features.double() @ model[2].weight.double().T + model[2].bias.double()
    assert np.array_equal(stored.features[:256], features[:256].numpy())
    np.testing.assert_allclose(stored.check_logits, logits[:256].numpy(), atol=1e-6)
    largest = float((logits[:256] - exact).abs().max())
    assert largest > 1e-4
    spread = float(exact.std(dim=1, correction=0).square().mean().sqrt()) if len(exact[0]) > 1 else None
    assert f"at most {largest:.2g}" in done.stderr
    assert spread is None or f"spread of the logits: {spread:.2g}" in done.stderr
    assert "of 256 predicted classes are the same" in done.stderr
    assert cli(*words).code == 73  # those of float32 are others

    # From Python the same network computes the same.
    cli("fit-laplace", "net.pt", "--prior-precision", "1")
    run = bnncli.open("net.pt", model="net.py:make")
    found = run.predict(inputs.numpy(), posterior="map", integrator="plug-in")
    assert np.array_equal(found.probs, run.predict(stored.features, posterior="map", integrator="plug-in").probs)


def test_what_precision_loses_is_measured_on_logits() -> None:
    exact = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.2, 0.1]])
    loss = PrecisionLoss.between(exact + torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.4]]), exact)
    assert loss.num_rows == 3
    assert loss.largest == 0.5
    assert loss.num_same == 2
    assert loss.spread == pytest.approx(np.sqrt(np.mean([0.25, 2.25, 0.0025])))
    single = PrecisionLoss.between(torch.tensor([[-0.1], [2.0]]), torch.tensor([[0.1], [2.0]]))
    assert (single.num_same, single.spread) == (1, pytest.approx(np.sqrt((0.01 + 4) / 2)))


def test_much_loss_is_warned_of(cli: Cli, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.commands.extract_features import network

    monkeypatch.setattr(network, "_MUCH", 1e-6)
    done = cli(
        "extract-features", "net.pt", "--model", "net.py:make", "--data", "train=npz:train.npz", "--autocast", "bf16",
        "--json",
    )  # fmt: skip
    assert any("in bf16" in text for text in done.json["warnings"])


@pytest.mark.parametrize(
    "words", [("--model", "flatten", "--data", "train=npz:train.npz"), ("--from-npz", "train.npz")]
)
def test_without_a_network_there_is_nothing_to_compute(cli: Cli, model: nn.Sequential, words: tuple[str, ...]) -> None:
    refused = cli("extract-features", "net.pt", *words, "--autocast", "bf16")
    assert (refused.code, "--autocast needs a network" in refused.stderr) == (2, True)


CONFIDENT = 50.0  # logits: a float64 of the probability is 1
ENDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "method": ("softmax", lambda logits: logits.softmax(-1)),
    "function": ("softmax", lambda logits: nn.functional.softmax(input=logits, dim=-1)),
    "module": ("softmax", nn.Softmax(-1)),
    "logarithm": ("log_softmax", lambda logits: torch.log(torch.softmax(logits, -1))),
    "sigmoid": ("sigmoid", lambda logits: torch.sigmoid(logits).unsqueeze(1).flatten(1)),
    "in place": ("sigmoid", lambda logits: logits.sigmoid_()),
}


@pytest.mark.parametrize("end", ENDS)
def test_logits_of_confident_outputs_are_those_that_went_in(end: str) -> None:
    link, apply = ENDS[end]
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    inputs = torch.tensor([[CONFIDENT], [-CONFIDENT], [0.5]], dtype=torch.float64)

    def logits(weight: Tensor, example: Tensor) -> Tensor:
        with record_link_inputs():
            output = apply((example.unsqueeze(0) @ weight.T) * 1)
        return find_logits_before(output, link)[0]

    of_all = torch.func.vmap(logits, in_dims=(None, 0))
    torch.testing.assert_close(of_all(weight, inputs), inputs @ weight.T, rtol=0, atol=0)
    rows = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))(weight, inputs)
    pushed = torch.func.jvp(lambda one: of_all(one, inputs), (weight,), (torch.ones_like(weight),))[1]
    torch.testing.assert_close(rows.sum(dim=(2, 3)), inputs.expand(3, 2))
    torch.testing.assert_close(pushed, inputs.expand(3, 2))


def test_probabilities_of_unseen_origin_are_undone_as_far_as_numbers_go() -> None:
    logits = torch.tensor([[0.0, -60.0, 3.0]])
    undone = find_logits_before(logits.softmax(-1), "softmax")
    torch.testing.assert_close(undone - undone.mean(), logits - logits.mean(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(find_logits_before(torch.sigmoid(logits / 10), "sigmoid"), logits / 10)
    assert torch.isfinite(find_logits_before(torch.tensor([0.0, 1.0]), "sigmoid")).all()


CPU = torch.device("cpu")


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(0))


class Counted:
    """Features and output of a small network, and how many examples came at once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.sizes: list[int] = []

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        values = inputs["x"] if isinstance(inputs, dict) else inputs
        self.sizes.append(len(values))
        with torch.inference_mode():
            features = self.network(values)
        return features, features.sum(dim=1)


@pytest.mark.parametrize("is_named", [False, True])
def test_parts_give_what_the_batch_gives_with_bounded_activations(
    is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, batch = Counted(), images(50)
    expected = read(batch)
    room = peak_bytes(lambda: read(batch)) // 5
    monkeypatch.setattr(features_module, "_CPU_BYTES", room)
    in_parts = FeatureComputation(read, CPU)
    inputs: Inputs = {"x": batch} if is_named else batch
    read.sizes.clear()
    found = in_parts(inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    measured, *sizes = read.sizes
    assert (measured, sum(sizes)) == (2, 50)
    assert all(2 <= size <= 10 for size in sizes)
    assert peak_bytes(lambda: in_parts(inputs)) < 1.3 * room
    read.sizes.clear()
    in_parts(inputs)
    assert read.sizes == sizes  # measured once


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_of_similar_lengths_are_computed_together(side: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat(
        [torch.randint(2, 9, (40,), generator=generator), torch.randint(90, 101, (24,), generator=generator)]
    )
    lengths = lengths[torch.randperm(64, generator=generator)]
    places = torch.arange(100) if side == "right" else torch.arange(99, -1, -1)
    mask = (places < lengths.unsqueeze(1)).long()
    ids = torch.randint(1, 50, (64, 100), generator=generator) * mask
    positions = 0

    def read(inputs: Inputs) -> tuple[Tensor, Tensor]:
        nonlocal positions
        assert isinstance(inputs, dict)
        positions += inputs["input_ids"].numel()
        assert inputs["row"].shape == inputs["input_ids"].shape[:1]
        features = (inputs["input_ids"] * inputs["attention_mask"]).sum(dim=1, keepdim=True).float()
        return torch.cat([features, inputs["row"].unsqueeze(1)], dim=1), features

    inputs = {"input_ids": ids, "attention_mask": mask, "row": torch.arange(64)}
    expected = read(inputs)
    whole, positions = positions, 0
    found = FeatureComputation(read, CPU, is_padded=True)(inputs)
    assert positions < 0.6 * whole
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    positions = 0
    FeatureComputation(read, CPU)(inputs)
    assert positions == whole
    positions = 0
    FeatureComputation(read, CPU, is_padded=True)({**inputs, "attention_mask": torch.ones_like(mask)})
    assert positions == whole


def test_batches_that_have_room_go_through_as_they_are() -> None:
    read = Counted()
    FeatureComputation(read, CPU)(images(50))
    assert read.sizes == [50]


def test_a_network_of_one_batch_size_gets_that(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counted()

    def fixed(inputs: Inputs) -> tuple[Tensor, Tensor]:
        if len(inputs) != 50:
            raise DataError("the network takes 50 inputs")
        return read(inputs)

    monkeypatch.setattr(features_module, "_CPU_BYTES", 1000)
    FeatureComputation(fixed, CPU)(images(50))
    assert read.sizes == [50]


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


NOISE = np.random.default_rng(0)  # no two of whose first numbers are nearly equal


class RandomByNumpy(Net):
    def changed(self, features: Tensor) -> Tensor:
        return features + float(NOISE.normal())


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
    "a module in train mode": (lambda: TrainingModule(nn.Dropout(0.2)), RANDOM, r"dropout in 'body.1' \(Dropout in training mode\) draws"),
    "numpy": (RandomByNumpy, RANDOM, "the forward pass is random"),
    "norm": (lambda: Net(PLAIN_NORM), BATCH, r"'body.1' \(BatchNorm1d without running statistics\) normalises with batch statistics"),
    "norm in train mode": (
        lambda: TrainingModule(nn.BatchNorm1d(8)),
        BATCH,
        r"'body.1' \(BatchNorm1d in training mode\) normalises with batch statistics",
    ),
    "mean": (LessTheMean, BATCH, "the forward pass mixes the examples of a batch"),
    "attention": (Attends, BATCH, "the forward pass mixes the examples of a batch"),
}  # fmt: skip


@pytest.fixture
def input_split(tmp_path: Path) -> InputSplit:
    inputs = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=inputs, y=np.arange(40) % 3)
    return load_split(f"npz:{tmp_path / 'a.npz'}")


def extracted_features(model: nn.Module, input_split: InputSplit, batch_size: int) -> Tensor:
    first = next(input_split.batches(len(input_split))).inputs
    head = find_head(model, lambda count: first[:count])
    return collect(extract(model, head, input_split, batch_size=batch_size), len(input_split)).features


@pytest.mark.parametrize("batch_size", [2, 7, 512])
@pytest.mark.parametrize("kind", REFUSED)
def test_random_and_batch_dependent_networks_are_refused(kind: str, batch_size: int, input_split: InputSplit) -> None:
    make, told, cause = REFUSED[kind]
    with pytest.raises(DataError, match=f"{told}.*{cause}") as caught:
        extracted_features(make(), input_split, batch_size)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind not in ("mean", "attention")])
def test_they_are_refused_an_example_at_a_time_too(kind: str, input_split: InputSplit) -> None:
    make, told, cause = REFUSED[kind]
    with pytest.raises(DataError, match=f"{told}.*{cause}"):
        extracted_features(make(), input_split, 1)


def test_the_first_error_is_told_where_there_is_no_second_example() -> None:
    def first(count: int) -> Tensor:
        if count > 1:
            raise DataError("images have different sizes")
        return torch.ones(1, 5)

    with pytest.raises(DataError, match="failed on inputs of shape"):
        find_head(Net(), first)


@pytest.mark.parametrize("batch_size", [1, 7, 512])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8), nn.RReLU(), nn.LayerNorm(8)], ids=repr)
def test_layers_that_training_alone_makes_random_are_fine(
    layer: nn.Module, batch_size: int, input_split: InputSplit
) -> None:
    model = Net(layer)
    inputs = next(input_split.batches(40)).inputs
    found = extracted_features(model, input_split, batch_size)
    torch.testing.assert_close(found, model.body(inputs).detach())


@pytest.mark.parametrize(("batch_size", "num_passes"), [(1, (3, 1, 1)), (40, (3, 3, 1))])
def test_a_network_is_checked_once_alone_and_once_in_a_batch(
    batch_size: int, num_passes: tuple[int, ...], input_split: InputSplit
) -> None:
    model, first = Net(), input_split.batches(40)
    inputs = next(first).inputs
    head, passes = find_head(model, lambda count: inputs[:count]), []
    model.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))
    few = input_split.take(np.arange(batch_size))
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
        "predict", "net.pt", "--posterior", "laplace", "--trust-code", "--data", "new=npz:data.npz", "--table",
        "t.csv",
    )  # fmt: skip
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
    inputs = {name: torch.from_numpy(array) for name, array in ids.items()}
    torch.testing.assert_close(found.features, model.pooled(**inputs).detach())
    torch.testing.assert_close(found.logits, model(**inputs).detach())
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
    with torch.no_grad():
        alone = model.pooled(inputs["input_ids"][1:2, :1], torch.ones(1, 1))[0]  # "dddd", one word of at most three
    expected = float((found.features[1] - alone).abs().max() / alone.abs().max())
    assert found.padding == pytest.approx(expected, abs=1e-6)
    assert (found.padding > features_module.MUCH) == is_much
    whole = collect(extract(model, head, named_split.take(np.array([3])), batch_size=1), 1)
    assert whole.padding is None  # there is nothing to pad


@pytest.mark.parametrize(("counts_padding", "expected"), [(False, 0.0), (True, 0.5)])
def test_padding_is_noticed_also_for_pairs_of_texts(*, counts_padding: bool, expected: float) -> None:
    ids = torch.tensor([[[5, 6, 7, 8], [1, 2, 3, 4]], [[5, 6, 0, 0], [7, 0, 0, 0]]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def mean(given: Any) -> tuple[Tensor, Tensor]:
        mask = torch.ones_like(given["attention_mask"]) if counts_padding else given["attention_mask"]
        found = given["input_ids"].float().sum(dim=2) / mask.sum(dim=2)
        return found, found

    assert padding_effect(mean, inputs, mean(inputs)[0]) == pytest.approx(expected)
