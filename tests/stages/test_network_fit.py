"""What extract-features says of how well a network fits its labels, and what stops auto and report on a misread one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.label_sets import label_arrays
from sklearn.metrics import accuracy_score, log_loss

from bnncli.artifacts.features import FeatureFile
from bnncli.artifacts.files import read_header
from bnncli.progress import SILENT
from bnncli.session.network_fit import NetworkFit, fit_of, recorded_fit

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
        recorded = recorded_fit(read_header(tmp_path / f"run.bnn/features/{split}.h5"))
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
    found = recorded_fit(read_header(run.with_name("one.bnn") / "features/train.h5"))
    assert found is not None
    assert found.nll == pytest.approx(log_loss(labels, probs), abs=1e-5)
    assert found.accuracy == pytest.approx(accuracy_score(labels, logits > 0), abs=1e-6)
    assert (found.uniform_nll, found.verdict) == (pytest.approx(np.log(2), abs=1e-6), "fits")

    several = label_arrays(head_scale=1.0)
    run = new_run(cli, tmp_path / "several", several)
    found = recorded_fit(read_header(run.with_name("several.bnn") / "features/train.h5"))
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
        done = cli("extract-features", tmp_path / str(number), "--from-npz", tmp_path / "given.npz", "--json")
        assert done.code == 0
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
    done = cli(*line)
    assert done.code == 0
    assert ("WARNING" in done.stderr) == (told is not None)
    if told is None:
        return
    assert told in done.stderr
    assert "wrong order or names of the classes, labels that start at 1" in done.stderr
    assert "probably misreads" in cli(*line).stderr  # up to date, and still misread
    for command in ("auto", "report"):
        stopped = cli(command, images / "net.pt", "--run-dir", tmp_path / "run")
        assert stopped.code == 3
        assert "probably misreads its inputs or labels: train: accuracy" in stopped.stderr
        assert "--accept-poor-network" in stopped.stderr
    assert not (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize("seed", range(5))
def test_no_scaling_is_proposed_for_a_network_that_knows_nothing(
    cli: Cli, images: Path, seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    weights = torch.load(images / "net.pt", weights_only=True)
    torch.save({name: torch.randn_like(value) * value.std() for name, value in weights.items()}, tmp_path / "net.pt")
    data = f"train=npz:{images}/train-bytes.npz"
    done = cli("extract-features", tmp_path / "net.pt", "--model", "lenet5", "--data", data)
    assert "--mean or --std missing or wrong, " in done.stderr


def test_auto_and_report_go_on_where_that_is_accepted(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", shifted(fitted()))
    assert cli("auto", run).code == 3
    assert cli("auto", run, "--accept-poor-network").code == 0
    assert cli("report", run).code == 3
    assert cli("report", run, "--accept-poor-network").code == 0
    page = (tmp_path / "run.bnn/report.html").read_text()
    assert "probably misreads" in page
    assert "with label - 1; the accuracy would then be" in page


def test_features_of_earlier_versions_have_no_verdict(cli: Cli, tmp_path: Path) -> None:
    assert recorded_fit(read_header(FIXTURES / "schema/1.0/features.h5")) is None


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
    assert cli("auto", run).code == 0


@pytest.mark.parametrize("num", [50, 1000])
@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_no_renumbering_is_found_of_a_network_at_chance(num_classes: int, num: int) -> None:
    generator = np.random.default_rng([num_classes, num])
    shares = generator.dirichlet(np.full(num_classes, 2.0))  # classes of different sizes
    found = 0
    for _ in range(NUM_SIMULATIONS):
        logits = 3 * generator.normal(size=(num, num_classes))
        found += fit_of_logits(logits, generator.choice(num_classes, size=num, p=shares)).relabelled is not None
    assert found <= MOST_FALSE * NUM_SIMULATIONS


@pytest.mark.parametrize("num", [5, 50, 1000])
@pytest.mark.parametrize("num_classes", [2, 10, 100])
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
