"""What extract-features says of a network on its training data, and of inputs that look odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli, new_run
from problems.label_sets import label_arrays
from sklearn.metrics import accuracy_score, log_loss

from bnncli.artifacts.features import FeatureFile
from bnncli.artifacts.files import read_header
from bnncli.data.pixels import Preprocess
from bnncli.data.shift import Shift
from bnncli.data.splits import InputSplit, load_split
from bnncli.models.architectures.mlp import build
from bnncli.models.features import InputSums
from bnncli.numerics.corruptions import CORRUPTIONS
from bnncli.progress import SILENT
from bnncli.session.network_fit import NetworkFit, difference, fit_of, read_recorded_fit

FIXTURES = Path(__file__).parents[2] / "fixtures"
NUM_SIMULATIONS = 500
MOST_FALSE = 0.01


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def fitted(num_classes: int = 5, num: int = 400, *, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Features whose labels follow the head's softmax; `scale` makes the head surer than that."""
    generator = np.random.default_rng(0)
    weight = 2 * generator.normal(size=(num_classes, 6))
    arrays = {"head_weight": (scale * weight).astype(np.float32), "head_bias": np.zeros(num_classes, np.float32)}
    for split in ("train", "val", "test"):
        features = generator.normal(size=(num, 6)).astype(np.float32)
        noise = generator.gumbel(size=(num, num_classes))
        arrays |= {f"features_{split}": features, f"labels_{split}": (features @ weight.T + noise).argmax(axis=1)}
    return arrays


def shifted(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    num_classes = len(arrays["head_weight"])
    return arrays | {name: (labels + 1) % num_classes for name, labels in arrays.items() if name.startswith("labels_")}


def fit_of_logits(logits: np.ndarray, labels: np.ndarray) -> NetworkFit:
    """The fit of a network with these logits (N, C)."""
    num, num_classes = logits.shape
    names = [str(number) for number in range(num_classes)]
    head = np.eye(num_classes, dtype=np.float32)
    content = FeatureFile(
        "test", logits.astype(np.float32), labels, np.arange(num), names, head, None, None, is_ood=False
    )
    found = fit_of(content, is_judged=True, progress=SILENT)
    assert found is not None
    return found


def test_accuracy_and_nll_are_those_of_scikit_learn(cli: Cli, tmp_path: Path) -> None:
    arrays = fitted()
    run = new_run(cli, tmp_path / "run", arrays)
    done = cli("extract-features", run, "--from-npz", tmp_path / "run.npz", "--force", "--json")
    for split in ("train", "val", "test"):
        probs = softmax(arrays[f"features_{split}"] @ arrays["head_weight"].T.astype(np.float64))
        labels, found = arrays[f"labels_{split}"], done.json["network_fit"][split]
        assert found["accuracy"] == pytest.approx(accuracy_score(labels, probs.argmax(axis=1)), abs=1e-6)
        assert found["nll"] == pytest.approx(log_loss(labels, probs), abs=1e-5)
        assert (found["verdict"], found["num_examples"]) == ("fits", 400)
        assert f"{split}: network accuracy {100 * found['accuracy']:.1f}%, NLL {found['nll']:.4f}" in (done.stderr)
        recorded = read_recorded_fit(read_header(tmp_path / f"run.bnn/features/{split}.h5"))
        assert recorded is not None
        assert recorded.to_json() == found
    assert done.json["warnings"] == []


def test_networks_of_one_logit_and_of_several_labels(cli: Cli, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(300, 4)).astype(np.float32)
    weight = np.array([[2.0, -1.0, 0.0, 1.0]], np.float32)
    logits = (features @ weight.T)[:, 0].astype(np.float64)
    probs = 1 / (1 + np.exp(-logits))
    labels = (generator.random(300) < probs).astype(np.int64)
    run = new_run(cli, tmp_path / "one", {"features_train": features, "labels_train": labels, "head_weight": weight})
    found = read_recorded_fit(read_header(run.with_name("one.bnn") / "features/train.h5"))
    assert found is not None
    assert found.nll == pytest.approx(log_loss(labels, probs), abs=1e-5)
    assert found.accuracy == pytest.approx(accuracy_score(labels, logits > 0), abs=1e-6)
    assert (found.uniform_nll, found.verdict) == (pytest.approx(np.log(2), abs=1e-6), "fits")

    several = label_arrays(head_scale=1.0)
    run = new_run(cli, tmp_path / "several", several)
    found = read_recorded_fit(read_header(run.with_name("several.bnn") / "features/train.h5"))
    assert found is not None
    logits = several["features_train"] @ several["head_weight"].T.astype(np.float64) + several["head_bias"]
    probs = 1 / (1 + np.exp(-logits))
    each = [
        log_loss(several["labels_train"][:, label], probs[:, label], labels=[0, 1]) for label in range(logits.shape[1])
    ]
    assert found.nll == pytest.approx(np.mean(each), abs=1e-5)
    assert found.accuracy == pytest.approx(((logits > 0) == several["labels_train"]).mean(), abs=1e-6)
    turned = several | {name: 1 - labels for name, labels in several.items() if name.startswith("labels_")}
    done = cli("extract-features", new_run(cli, tmp_path / "turned", turned), "--from-npz", tmp_path / "turned.npz")
    assert "probably misreads" in done.stderr


def test_without_a_head_or_labels_nothing_is_said(cli: Cli, tmp_path: Path) -> None:
    arrays = fitted()
    headless = {name: array for name, array in arrays.items() if not name.startswith("head")}
    unlabelled = {name: array for name, array in arrays.items() if not name.startswith("labels")}
    for number, given in enumerate((headless, unlabelled)):
        np.savez(tmp_path / "given.npz", **given)
        done = cli("extract-features", tmp_path / str(number), "--from-npz", tmp_path / "given.npz", "--json").expect(0)
        assert "network_fit" not in done.json
        assert "accuracy" not in done.stderr


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixtures' network, some of its images, the same with labels that are shifted, and as real numbers in 0..255."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "net.pt").write_bytes((FIXTURES / "lenet5-fmnist.pt").read_bytes())
    for split in ("train", "val"):
        with np.load(FIXTURES / f"{split}.npz") as arrays:
            x, y = arrays["x"][:400], arrays["y"][:400]
        np.savez(folder / f"{split}.npz", x=x, y=y)
        np.savez(folder / f"{split}-shifted.npz", x=x, y=(y + 1) % 10)
        np.savez(folder / f"{split}-bytes.npz", x=x[:, None].astype(np.float32), y=y)
    return folder


@pytest.mark.parametrize(
    ("data", "words", "told"),
    [
        ("", (), None),
        ("-shifted", (), "labels look shifted by one: with label - 1; the accuracy would then be "),
        ("-bytes", (), "nats per error"),
        ("-bytes", (), "(--mean 0 --std 255 gives accuracy "),
        ("", ("--mean", "-9", "--std", "0.05"), "(--mean 0 --std 1 gives accuracy "),
        ("", ("--mean", "-9", "--std", "0.05"), "channels in another order (RGB, BGR)"),
    ],
)
def test_images_that_are_misread_are_told_with_numbers_and_causes(
    cli: Cli, images: Path, data: str, words: tuple[str, ...], told: str | None, tmp_path: Path
) -> None:
    specs = [word for split in ("train", "val") for word in ("--data", f"{split}=npz:{images}/{split}{data}.npz")]
    line = ("extract-features", images / "net.pt", "--model", "lenet5", "--run-dir", tmp_path / "run", *specs, *words)
    done = cli(*line).expect(0)
    assert ("WARNING" in done.stderr) == (told is not None)
    if told is None:
        return
    assert told in done.stderr
    assert "wrong order or names of the classes, labels that start at 1" in done.stderr
    assert "probably misreads" in cli(*line).stderr  # up to date, and still misread
    for command in ("auto", "report"):
        cli(command, images / "net.pt", "--run-dir", tmp_path / "run").expect(
            3, "probably misreads its inputs or labels: train: accuracy", "--accept-poor-network"
        )
    assert not (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize("seed", range(2))
def test_no_scaling_is_proposed_for_a_random_network(cli: Cli, images: Path, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    weights = torch.load(images / "net.pt", weights_only=True)
    torch.save({name: torch.randn_like(value) * value.std() for name, value in weights.items()}, tmp_path / "net.pt")
    data = f"train=npz:{images}/train-bytes.npz"
    done = cli("extract-features", tmp_path / "net.pt", "--model", "lenet5", "--data", data)
    assert "--mean or --std missing or wrong, " in done.stderr


@pytest.mark.long
def test_auto_and_report_go_on_where_that_is_accepted(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", shifted(fitted()))
    cli("auto", run).expect(3)
    cli("auto", run, "--accept-poor-network").expect(0)
    cli("report", run).expect(3)
    cli("report", run, "--accept-poor-network").expect(0)
    page = (tmp_path / "run.bnn/report.html").read_text()
    assert "probably misreads" in page
    assert "with label - 1; the accuracy would then be" in page


def test_features_of_earlier_versions_have_no_verdict(cli: Cli, tmp_path: Path) -> None:
    assert read_recorded_fit(read_header(FIXTURES / "schema/1.0/features.h5")) is None


def test_a_permutation_of_some_classes_is_told_by_their_names() -> None:
    arrays = fitted(num_classes=4, scale=1.0)
    logits = arrays["features_test"] @ arrays["head_weight"].T
    swapped = np.array([2, 1, 0, 3])[arrays["labels_test"]]
    found = fit_of_logits(logits, swapped)
    assert found.verdict == "misread"
    assert found.relabelled is not None
    assert found.relabelled["how"] in ("permuted: with '0' as '2', '2' as '0'", "permuted: with '2' as '0', '0' as '2'")
    assert found.relabelled["accuracy"] == pytest.approx(
        (logits.argmax(axis=1) == arrays["labels_test"]).mean(), abs=1e-6
    )
    two = fitted(num_classes=2)
    exchanged = fit_of_logits(two["features_test"] @ two["head_weight"].T, 1 - two["labels_test"])
    assert "'1' as '0', '0' as '1'; the accuracy would then be" in exchanged.doubt("test")


def test_an_accurate_network_that_is_too_sure_is_overconfident_and_no_more(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", fitted(scale=12.0))
    done = cli("extract-features", run, "--from-npz", tmp_path / "run.npz", "--force")
    assert "WARNING" not in done.stderr
    assert "accurate but overconfident" in done.stderr
    cli("auto", run).expect(0)


@pytest.mark.parametrize(
    ("num_classes", "num"), [(2, 50), (100, 50), *(pytest.param(n, 1000, marks=pytest.mark.long) for n in (2, 10, 100))]
)
def test_no_renumbering_is_found_of_a_network_at_chance(num_classes: int, num: int) -> None:
    generator = np.random.default_rng([num_classes, num])
    shares = generator.dirichlet(np.full(num_classes, 2.0))  # classes of different sizes
    found = 0
    for _ in range(NUM_SIMULATIONS):
        logits = 3 * generator.normal(size=(num, num_classes))
        found += fit_of_logits(logits, generator.choice(num_classes, size=num, p=shares)).relabelled is not None
    assert found <= MOST_FALSE * NUM_SIMULATIONS


@pytest.mark.parametrize(
    ("num_classes", "num"), [(2, 5), (10, 50), *(pytest.param(n, 1000, marks=pytest.mark.long) for n in (2, 10, 100))]
)
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_networks_whose_confidence_is_true_are_not_called_misread(num_classes: int, num: int, scale: float) -> None:
    generator = np.random.default_rng([num_classes, num])
    found, num_simulations = 0, NUM_SIMULATIONS // 5 if num_classes * num > 50_000 else NUM_SIMULATIONS
    for _ in range(num_simulations):
        logits = scale * generator.normal(size=(num, num_classes))
        labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
        found += fit_of_logits(logits, labels).verdict == "misread"
    assert found <= MOST_FALSE * num_simulations


@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_networks_at_chance_are_found_and_few_rows_are_not_enough(num_classes: int) -> None:
    generator = np.random.default_rng(num_classes)
    found = {
        num: np.mean(
            [
                fit_of_logits(
                    4 * generator.normal(size=(num, num_classes)), generator.integers(num_classes, size=num)
                ).verdict
                == "misread"
                for _ in range(100)
            ]
        )
        for num in (5, 1000)
    }
    assert found[5] <= MOST_FALSE
    assert found[1000] >= 0.99


DATA = Path(__file__).resolve().parents[3] / "shared/data"
KINDS = ("fmnist-train", "fmnist-test", "mnist-test", "kmnist-test", "notmnist-test", "emnist-letters-test")
COLOURS = ("cifar10-train10k", "cifar10-test", "cifar100-test5k")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 4 x 4 as bytes and as real numbers in several scales, a network, and image files."""
    folder = tmp_path_factory.mktemp("scales")
    generator = np.random.default_rng(0)
    labels = np.arange(300) % 3
    images = generator.integers(256, size=(300, 1, 4, 4), dtype=np.uint8)
    reals = images.astype(np.float32) / 255
    arrays = {
        "bytes": images,
        "unit": reals,
        "f255": reals * 255,
        "tiny": reals / 255,
        "signed": reals * 2 - 1,
        "faint": 0.05 * reals,
        "dark": 0.5 * reals,
    }
    for name, array in arrays.items():
        np.savez(folder / f"{name}.npz", x=array, y=labels)
    torch.manual_seed(0)
    torch.save(build(inputs=16, hidden=(6,), classes=3).state_dict(), folder / "net.pt")
    (folder / "in").mkdir()
    for number, image in enumerate(images[:20, 0]):
        Image.fromarray(image).save(folder / f"in/{number}.png")
    return folder


def extract(cli: Cli, folder: Path, *words: object) -> Any:
    done = cli("extract-features", folder / "net.pt", "--model", "mlp", "--json", *words).expect(0)
    return [text for text in done.json["warnings"] if "misreads" not in text]


def test_the_numbers_are_those_of_numpy(cli: Cli, folder: Path, tmp_path: Path) -> None:
    assert extract(cli, folder, "--data", f"train=npz:{folder}/bytes.npz", "--run-dir", tmp_path / "run") == []
    with np.load(folder / "bytes.npz") as arrays:
        pixels = arrays["x"] / 255
    found = read_header(tmp_path / "run/features/train.h5").provenance["input_statistics"]
    assert (found["num_rows"], found["shape"], found["min"], found["max"]) == (300, [1, 4, 4], 0, 1)
    few = found["mean"] + found["std"] + [found["zeros"], found["negative"], found["mean_absolute"]]
    some = np.concatenate([pixels[:256:4], pixels[256:]])  # at most 64 rows of a batch
    own = [some.mean(), some.std(), (some == 0).mean(), 0, some.mean()]
    assert few == pytest.approx(own, rel=1e-5)


TOLD = {
    ("unit", "bytes"): None,
    ("unit", "dark"): None,
    ("unit", "f255"): r"test: values are about 255 times as large as in train (uint8 is divided by 255",
    ("unit", "tiny"): "test: values are about 255 times smaller than in train",
    ("f255", "bytes"): "test: values are about 255 times smaller than in train",
    ("unit", "signed"): "% of the values are negative, but 0% in train: only one of them is normalised",
    ("signed", "unit"): "test: 0% of the values are negative, but ",
}


@pytest.mark.parametrize(("train", "test"), TOLD)
def test_another_scale_is_told_with_numbers(cli: Cli, folder: Path, train: str, test: str, tmp_path: Path) -> None:
    line = (
        "--data",
        f"train=npz:{folder}/{train}.npz",
        "--data",
        f"test=npz:{folder}/{test}.npz",
        "--run-dir",
        tmp_path,
    )
    told = TOLD[train, test]
    for _ in range(2):  # up to date, and still told
        warnings = extract(cli, folder, *line)
        assert len(warnings) == (told is not None)
        assert told is None or (
            told in warnings[0] and "(train: " in warnings[0] and ", standard deviation " in warnings[0]
        )


def test_ood_data_may_differ_in_all_but_a_factor(cli: Cli, folder: Path, tmp_path: Path) -> None:
    line = ("--data", f"train=npz:{folder}/unit.npz", "--run-dir", tmp_path)
    names = ("tiny", "signed", "faint", "f255")
    warnings = extract(cli, folder, *line, *(f"--ood={name}=npz:{folder}/{name}.npz" for name in names))
    assert [text.partition(":")[0] for text in warnings] == ["tiny", "f255"]


def test_new_data_and_arriving_images_are_compared_with_the_run(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = ("--run-dir", tmp_path / "run")
    for train, told in (("unit", 0), ("f255", 1)):
        extract(cli, folder, "--data", f"train=npz:{folder}/{train}.npz", *run, "--force")
        cli("fit-laplace", folder / "net.pt", *run, "--prior-precision", 1, "--force").expect(0)
        predicted = ("predict", folder / "net.pt", *run, "--posterior", "laplace", "--table")
        for number, words in enumerate(
            (("--data", f"new=npz:{folder}/bytes.npz"), ("--follow", folder / "in", "--idle", 0))
        ):
            done = cli(*predicted, tmp_path / f"{train}{number}.csv", *words).expect(0)
            assert done.stderr.count("times smaller than in train") == told
    kept = (tmp_path / "kept.csv", "--data", f"kept=npz:{folder}/bytes.npz", "--keep-features")
    assert cli(*predicted, *kept).stderr.count("kept: values are about 255 times smaller than in train") == 1


def statistics(split: InputSplit) -> dict[str, Any]:
    sums: InputSums | None = None
    for batch in split.batches(256):
        sums = InputSums.of(batch.inputs).plus(sums)
    assert sums is not None
    return sums.statistics()


def of_tokens(ids: np.ndarray) -> dict[str, Any]:
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones(ids.shape, dtype=torch.int64)}
    return InputSums.of(inputs).statistics()


def test_texts_of_another_vocabulary_are_told() -> None:
    generator = np.random.default_rng(0)
    usual = 10 + (generator.zipf(1.3, size=(500, 20)) % 5000)
    train, same = of_tokens(usual[:300]), of_tokens(usual[300:])
    unknown = of_tokens(np.where(generator.random(usual.shape) < 0.6, 1, usual))
    others = of_tokens(usual + 5000)
    few = of_tokens(others["tokens"]["commonest"][0] * np.ones((2, 20), np.int64))
    found = [difference("test", one, "train", train, is_scale_alone=False) for one in (same, unknown, others, few)]
    assert found[0] is None
    assert found[1] is not None
    assert "60% of its tokens have the id 1, but 0% in train; if this is the unknown token," in found[1]
    assert found[2] is not None
    assert "of its tokens" in found[2]
    assert found[3] is None
    assert difference("test", others, "train", train, is_scale_alone=True) is None


def test_padding_is_no_token() -> None:
    ids, mask = torch.tensor([[5, 0, 0], [5, 6, 7]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    found = InputSums.of({"input_ids": ids, "attention_mask": mask}).statistics()["tokens"]
    assert found == {"num": 4, "commonest": [5, 6, 7], "counts": [2, 1, 1]}


def test_inverted_images_are_told() -> None:
    images = (torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.8).clamp(min=0) * 5
    train, inverted = (InputSums.of(one).statistics() for one in (images, 1 - images))
    told = difference("test", inverted, "train", train, is_scale_alone=False)
    assert told is not None
    assert told.startswith("test: images look inverted compared with train: 0")
    assert difference("test", inverted, "train", train, is_scale_alone=True) is None


def test_images_of_another_size_are_told() -> None:
    generator = torch.Generator().manual_seed(0)
    small, large = (InputSums.of(torch.rand(20, 3, size, size, generator=generator)).statistics() for size in (8, 16))
    told = difference("test", large, "train", small, is_scale_alone=False)
    assert told is not None
    assert told.startswith("test: images have 16 x 16 pixels, but 8 x 8 in train (see ")
    assert difference("test", large, "train", small, is_scale_alone=True) is None


def test_a_few_black_or_white_images_are_nothing_odd() -> None:
    train = InputSums.of(torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))).statistics()
    for image in (torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)):
        assert difference("new", InputSums.of(image).statistics(), "train", train, is_scale_alone=False) is None


@pytest.mark.shared
@pytest.mark.skipif(not DATA.exists(), reason="needs the full-size data")
@pytest.mark.parametrize("kinds", [KINDS, COLOURS], ids=["grey", "colour"])
def test_ordinary_shift_is_not_told(kinds: tuple[str, ...]) -> None:
    opened = [load_split(f"npz:{DATA / kind}.npz@300", preprocess=Preprocess()) for kind in kinds]
    train = statistics(opened[0])
    normalised = Preprocess.parse(mean="0.5", std="0.25")
    for split, kind in zip(opened[1:], kinds[1:], strict=True):
        assert difference(kind, statistics(split), "train", train, is_scale_alone=False) is None
    again = statistics(load_split(f"npz:{DATA / kinds[0]}.npz@300", preprocess=normalised))
    assert "negative" in str(difference("normalised", again, "train", train, is_scale_alone=False))
    few = opened[1].take(np.arange(60))
    shifts = [Shift(corrupt=f"{kind}:5") for kind in CORRUPTIONS] + [
        Shift(rotate=angle) for angle in (45.0, 90.0, 180.0)
    ]
    for shift in shifts:  # as copies that somebody has saved are
        changed = statistics(InputSplit(few.spec, few.dataset, few.rows, few.preprocess, True, shift=shift))
        assert difference(str(shift), changed, "train", train, is_scale_alone=False) is None
