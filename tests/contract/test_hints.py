"""What refusals say of data and checkpoints: what was found, and the words that help, tried out."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli

from bnncli.cli.commands import own_commands
from bnncli.cli.options import option_fields
from bnncli.data.splits import load_split
from bnncli.errors import DataError
from bnncli.models.checkpoints import load_checkpoint
from bnncli.options.command import CommonOptions
from bnncli.registry import load_module

Arrays = dict[str, np.ndarray]
X = np.ones((4, 3), np.float32)
LABELS = {
    "no label": (np.array([[1.0, 0], [0, 1], [0, 0], [1, 0]]), r"row 2 has 0 ones .*multi-label", "task.* multilabel"),
    "one-hot": (np.eye(4), r"one-hot", r"labels.argmax\(1\); .*task.* multilabel"),
    "soft": (np.full((4, 2), 0.5), r"soft labels", r"labels.argmax\(1\)"),
    "targets": (np.full((4, 2), 1.5), r"real numbers \(regression targets", "one class per example"),
    "regression": (np.array([0.0, 1, 0.37, 2]), r"row 2 is 0.37 \(regression targets", "one class per example"),
    "floats": (np.array([0.0, 1, 2, 2]), r"got float64$", "astype"),
    "missing": (np.array([0.0, np.nan, 2, 2]), r"row 1 is NaN", "without a label"),
    "names": (np.array(["cat", "dog", "cat", "owl"]), r": names", r"np.unique\(labels, return_inverse=True\)\[1\]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LABELS)
def test_labels_that_are_not_one_class_an_example_are_called_what_they_are(tmp_path: Path, kind: str) -> None:
    labels, message, hint = LABELS[kind]
    np.savez(tmp_path / "d.npz", x=X, y=labels)
    with pytest.raises(DataError, match=message) as caught:
        load_split(f"npz:{tmp_path}/d.npz")
    assert caught.value.code == "bad_labels"
    with pytest.raises(AssertionError, match=hint):
        raise AssertionError(caught.value.hint)


@pytest.mark.parametrize(("label", "message"), [("[0, 1, 0]", "one-hot"), ("0.5", "regression")])
def test_labels_of_a_dataset_are_called_what_they_are(tmp_path: Path, label: str, message: str) -> None:
    (tmp_path / "rows.py").write_text(
        "import torch\nclass Rows:\n    def __len__(self):\n        return 2\n    def __getitem__(self, i):\n"
        f"        return torch.ones(3), torch.tensor({label})\n"
    )
    with pytest.raises(DataError, match=message):
        load_split(f"py:{tmp_path}/rows.py:Rows")


TEXT_NETWORK = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 4)
        self.fc = torch.nn.Linear(4, 3)
    def forward(self, ids):
        return self.fc(self.embedding(ids).mean(1))
class Rows:
    def __len__(self):
        return 9
    def __getitem__(self, i):
        return torch.arange(5) + i, i % 3
"""


def test_token_ids_are_sent_to_a_dataset_which_takes_them(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", x=np.arange(45).reshape(9, 5), y=np.arange(9) % 3)
    (tmp_path / "text_network.py").write_text(TEXT_NETWORK)
    torch.manual_seed(0)
    state = {"embedding.weight": torch.randn(50, 4), "fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}
    torch.save(state, tmp_path / "net.pt")
    words = ("extract-features", tmp_path / "net.pt", "--model", f"{tmp_path}/text_network.py:Network", "--json")
    done = cli(*words, "--data", f"train=npz:{tmp_path}/ids.npz").expect(65)
    assert "integers (int64) from 0 to 44" in done.json["error"]["message"]
    assert "token ids" in done.json["error"]["hint"]
    assert "float32" not in done.json["error"]["hint"]
    cli(*words, "--data", f"train=py:{tmp_path}/text_network.py:Rows").expect(0)
    cli(*words, "--data", f"test=py:{tmp_path}/text_network.py:Rows", "--mean", "0.5").expect(2)


def test_a_transposed_head_is_called_so_and_the_hint_is_right(cli: Cli, arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    np.savez(path, **{**arrays, "head_weight": arrays["head_weight"].T})
    done = cli("extract-features", tmp_path / "run", "--from-npz", path, "--json")
    assert (done.code, done.json["error"]["hint"]) == (65, "save head_weight.T")
    assert "head_weight has shape (5, 3), expected (K, 5); it looks transposed" in done.json["error"]["message"]
    np.savez(path, **{**arrays, "head_weight": arrays["head_weight"].T.T})
    cli("extract-features", tmp_path / "run", "--from-npz", path).expect(0)


TWO_HEADS = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, {first}), torch.nn.Linear(4, 2)
    def forward(self, x):
        x = self.body(x).relu()
        return {output}
"""


def two_heads(folder: Path, output: str, first: int = 2) -> list[object]:
    torch.manual_seed(0)
    shapes = {"body": (4, 3), "first": (first, 4), "second": (2, 4)}
    state = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    state |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in shapes.items()}
    torch.save(state, folder / "net.pt")
    (folder / "net.py").write_text(TWO_HEADS.format(first=first, output=output))
    np.savez(folder / "d.npz", x=np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), y=np.arange(6) % 2)
    spec = f"train=npz:{folder}/d.npz"
    return ["extract-features", folder / "net.pt", "--model", f"{folder}/net.py:Network", "--data", spec, "--json"]


@pytest.mark.parametrize("first", [2, 5])
def test_the_layer_that_gives_the_output_is_named(cli: Cli, tmp_path: Path, first: int) -> None:
    words = two_heads(tmp_path, "self.first(x), self.second(x)", first)
    error = cli(*words).json["error"]
    assert error["code"] == "not_the_head"
    assert "the network returns 2 outputs, and the first is used" in error["message"]
    assert error["hint"] == "add --last-layer first"
    cli(*words, *error["hint"].removeprefix("add ").split()).expect(0)


def test_outputs_of_two_layers_together_name_the_option(cli: Cli, tmp_path: Path) -> None:
    done = cli(*two_heads(tmp_path, "torch.cat([self.first(x), self.second(x)], 1)"))
    assert (done.code, done.json["error"]["code"]) == (65, "not_the_head")
    assert "--last-layer" in done.json["error"]["hint"]


STATE = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones(2)}


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_is_called_so_and_the_hint_converts_it(cli: Cli, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "step-100"
    dcp.save(STATE, checkpoint_id=str(folder), no_dist=True)
    part = next(folder.glob("*.distcp"))
    done = cli("extract-features", folder, "--model", "lenet5", "--data", "a=npz:x.npz", "--json")
    assert (done.code, done.json["error"]["code"]) == (66, "sharded")
    assert "distributed checkpoint (1 .distcp files)" in done.json["error"]["message"]
    for path in (part, folder / ".metadata"):
        with pytest.raises(DataError, match="distributed checkpoint") as caught:
            load_checkpoint(path)
        assert caught.value.hint == done.json["error"]["hint"]
    words = shlex.split(done.json["error"]["hint"].removeprefix("merge it into one file:"))
    cli(*words[1:]).expect(0)
    state = load_checkpoint(Path(words[-1])).state
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


def test_hints_of_a_copied_run_name_the_copy(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(small_run.with_name("small.bnn"), folder / "copy.bnn")
    shutil.rmtree(small_run.with_name("small.bnn"))
    cli("fit-laplace", folder / "copy", "--prior-precision", "9", "--force").expect(0)
    hint = cli("predict", folder / "copy", "--posterior", "refine", "--json").json["error"]["hint"]
    assert shlex.split(hint)[:3] == ["bnncli", "refine", str(folder / "copy")]
    notes = [one["remake"] for one in cli("status", folder / "copy", "--json").json["artifacts"]]
    assert all(str(small_run) not in shlex.split(note) for note in notes)
    cli(*shlex.split(hint)[1:]).expect(0)


def test_hints_of_a_copy_find_the_argument_behind_options(cli: Cli, small_run: Path) -> None:
    words = ("fit-laplace", "--name", "small", "--prior-precision", "10", "-f", small_run)
    cli(*words).expect(0)
    shutil.move(small_run.with_name("small.bnn"), small_run.with_name("other.bnn"))
    other = small_run.with_name("other")
    notes = {one["name"]: one["remake"] for one in cli("status", other, "--json").json["artifacts"]}
    expected = ["bnncli", "fit-laplace", "--name", "small", "--prior-precision", "10", str(other)]
    assert shlex.split(notes["posteriors/small.safetensors"]) == expected


def test_no_flag_stands_alone_in_one_command_and_takes_a_value_in_another() -> None:
    kinds: dict[str, set[bool]] = {}
    for command in own_commands():
        for name, (_, hint) in option_fields(command).items():
            kinds.setdefault(name, set()).add(hint is bool)
    assert all(len(kind) == 1 for kind in kinds.values())
    assert CommonOptions in {group for command in own_commands() for group in command.groups}


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_run_without_a_checkpoint_may_have_the_name_of_a_folder(cli: Cli, small_run: Path, slash: str) -> None:
    (small_run.with_name("data")).mkdir()
    run = f"{small_run.with_name('data')}{slash}"
    npz = small_run.with_name("features.npz")
    cli("extract-features", run, "--from-npz", npz, "--ood", "far").expect(0)
    assert small_run.with_name("data.bnn").is_dir()
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("predict", run, "--split", "test").expect(0)
    cli("status", run, "--check").expect(0)
    cli("fit-laplace", small_run.with_name("data").parent).expect(66)
    for odd in (small_run.with_name("data.bnn"), small_run.with_name("data") / ".."):
        cli("extract-features", odd, "--from-npz", npz).expect(66)


@pytest.fixture
def lenet(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(load_module("networks", "lenet5").build().state_dict(), tmp_path / "lenet.pt")
    images = np.random.default_rng(0).normal(size=(20, 1, 28, 28)).astype(np.float32)
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(20) % 10)
    np.savez(tmp_path / "no_channel.npz", x=images[:, 0], y=np.arange(20) % 10)
    (tmp_path / "net.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(3, 2)\n")
    (tmp_path / "paths.csv").write_text("path,label\na/1.png,0\na/2.png,1\n")
    return tmp_path / "lenet.pt"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--model", "lenet"), "did you mean 'lenet5' or"),
        (("--model", "LeNet5"), "did you mean 'lenet5'?"),
        (("--model", "resnet20"), "the tensors match lenet5: use --model lenet5"),
        (("--model", "net.py:make"), "it has 'build'"),
        (("--model", "lenet5", "--data", "train=npz:lenet.pt"), "'lenet.pt' is a PyTorch checkpoint, not an npz file"),
        (("--model", "lenet5", "--data", "train=npz:no_channel.npz"), "save x[:, None]"),
        (("--model", "lenet5", "--data", "train=csv:paths.csv"), "name their column: image=COLUMN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_was_meant_by_a_network_or_its_data_is_told(
    cli: Cli, lenet: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], hint: str
) -> None:
    monkeypatch.chdir(lenet.parent)
    more = () if "--data" in words else ("--data", "train=npz:images.npz")
    done = cli("extract-features", "lenet.pt", *words, *more)
    assert done.code in (2, 65)
    assert hint in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["fit-laplace", "predict", "evaluate", "status", "clean", "diagnose", "report"])
def test_misspelt_checkpoint_is_suggested(cli: Cli, lenet: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(lenet.parent)
    error = cli(command, "lent.pt", "--json").json["error"]
    assert (error["message"], error["hint"]) == (
        "no checkpoint lent.pt, and no run folder lent.pt.bnn",
        "did you mean 'lenet.pt'?",
    )


def test_token_ids_beyond_the_embedding_are_told(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TEXT_NETWORK.replace("arange(5) + i", "arange(5) + 9 * i"))
    torch.manual_seed(0)
    state = {"embedding.weight": torch.randn(50, 4), "fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3)}
    torch.save(state, tmp_path / "net.pt")
    words = ("--model", f"{tmp_path}/net.py:Network", "--data", f"train=py:{tmp_path}/net.py:Rows")
    error = cli("extract-features", tmp_path / "net.pt", *words, "--json").json["error"]
    assert "embedding has 50 tokens, numbered from 0, but the inputs contain token 76" in error["message"]


def test_options_before_the_command_are_told_with_the_line_that_was_meant(cli: Cli, tmp_path: Path) -> None:
    done = cli("--json", "-q", "status", f"{tmp_path}/absent")
    assert (done.code, done.json["error"]["hint"]) == (2, f"bnncli status {tmp_path}/absent --json -q")


def test_a_checkpoint_is_not_converted_into_a_name_of_pytorchs(cli: Cli, lenet: Path) -> None:
    target = lenet.with_name("plain.pt")
    error = cli("convert", lenet, target, "--json").json["error"]
    assert error["hint"] == f"name it {target.with_suffix('.safetensors')}"
    assert not target.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "mlp", "--model-arg", "hidden=0"), "layers of at least one unit"),
        (
            ("--model", "lenet5", "--augment", "crop", "--padding", "28"),
            "--padding: expected fewer pixels than the images have",
        ),
    ],
)
def test_senseless_networks_are_refused(cli: Cli, lenet: Path, words: tuple[str, ...], message: str) -> None:
    target = lenet.with_name("new.safetensors")
    done = cli("train", target, *words, "--data", f"train=npz:{lenet.with_name('images.npz')}", "--epochs", 1)
    assert (done.code, message in done.stderr, target.exists()) == (2, True, False), done.stderr


def write_images(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), color=len(name)).save(folder / name, format="PNG")


def test_classes_that_only_one_split_has_are_named_and_hidden_files_counted(cli: Cli, tmp_path: Path) -> None:
    write_images(tmp_path / "one", "cat/1.png", "dog/1.png", "cat/._1.png", "__MACOSX/cat/._1.png", "cat/.kept/1.png")
    write_images(tmp_path / "two", "cat/1.png", "fox/1.png")
    words = ("extract-features", tmp_path / "run", "--model", "flatten", "--data", f"train=images:{tmp_path}/one")
    refused = cli(*words, "--data", f"test=images:{tmp_path}/two", "--json").json["error"]["message"]
    assert "only 'train' has 'dog'; only 'test' has 'fox'" in refused
    done = cli(*words)
    assert (done.code, "train: 2 examples" in done.stderr, "3 hidden files" in done.stderr) == (0, True, True), (
        done.stderr
    )
