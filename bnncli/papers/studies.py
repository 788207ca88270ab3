"""Studies: grids of commands on one data set, whose results the recipes of several works read.

At `quick` a study is the smallest case that shows an effect. At `paper` it has the published sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.papers.recipe import Files, Grid, Step, Study, needs, step, study

QUICK_FMNIST = {
    "net": "fixtures/lenet5-fmnist.pt",
    **{name: f"fixtures/{name}.npz" for name in ("train", "val", "test")},
}
PAPER_FMNIST = {f"net{n}": f"checkpoints/lenet-fmnist-{n}.pt" for n in (1, 2, 3)}
PAPER_FMNIST |= {"train": "data/fmnist-train.npz", "test": "data/fmnist-test.npz"}
RESNET20 = {"model": "resnet20", "mean": "0.485,0.456,0.406", "std": "0.229,0.224,0.225"}
RESNET20_FILES = {
    "net": "checkpoints/resnet20-12fca82f.th",
    "train": "data/cifar10-train10k.npz",
    "test": "data/cifar10-test.npz",
}
WIDE_RESNET_FILES = {
    "net": "checkpoints/wrn16-4-cifar10.pt",
    "train": "data/cifar10-train.npz",
    "test": "data/cifar10-test.npz",
}
ANGLES = range(15, 181, 15)
SEVERITIES = range(1, 6)
CORRUPTIONS: tuple[str, ...] = (
    *("gaussian-noise", "shot-noise", "impulse-noise", "gaussian-blur"),
    *("brightness", "contrast", "pixelate", "jpeg"),
)
QUICK_CORRUPTIONS: tuple[str, ...] = ("gaussian-noise", "gaussian-blur", "contrast", "jpeg")
SHIFTED_SCORES = ["nll", "ece"]
SCORES = ["nll", "accuracy", "brier", "ece"]
SAMPLERS = {"quick": {"chains": 8, "draws": 100}, "paper": {"chains": 16, "draws": 260}}
# fmt: off
TRAININGS: dict[str, dict[str, Any]] = {"quick": {"epochs": 30, "learning_rate": 0.02}, "paper": {"epochs": 20, "learning_rate": 0.001}}


def _npz(files: Files, **limits: str) -> list[str]:
    """Return NAME=npz:FILE for each name whose file is there, followed by its limit, such as @1000."""
    return [f"{name}=npz:{files[name]}{limit}" for name, limit in limits.items() if name in files]


def _fmnist(scale: str, files: Files) -> tuple[list[str], list[str], list[str]]:
    """Return checkpoints, data and held-out rows of LeNet-5 on Fashion-MNIST."""
    if scale == "quick":
        return [str(files["net"])], _npz(files, train="", val="", test=""), []
    return [str(files[f"net{n}"]) for n in (1, 2, 3)], _npz(files, train="", test=""), ["val=test:2000"]


def _refine(name: str, length: int | list[int], *, base: str = "{la}", prior: float, epochs: int, learning_rate: float) -> Step:
    """Refine with radial layers in weight space, as published."""
    return step("refine", name, base=base, flow="radial", length=length, space="weight", prior_precision=prior, epochs=epochs,
                batch_size=128, learning_rate=learning_rate, patience=0)


def _hmc(name: str, *, chains: int, draws: int, seed: int | None = None) -> Step:
    return step("hmc", name, base="{mode}", prior_precision="inherit", chains=chains, draws=draws, seed=seed)


# Last layers.


def _last_layer(scale: str, *, extract: Mapping[str, Any], prior: float, structure: str = "full",
                training: Mapping[str, Any] = TRAININGS["paper"], scores: list[str] = SCORES) -> list[Step]:
    """Fit Laplace as published, radial refinements of it, HMC and the Gaussian at the mode; predict and score with each.

    Args:
        extract: options of extract-features.
        prior: precision of the target's prior.
        structure: of both Gaussians.
        scores: of compare.
    """
    sampler = SAMPLERS[scale] | ({"draws": 150} if scale == "quick" else {})
    lengths = [1, 5, 10, 30]
    return [
        step("extract-features", **extract),
        step("fit-temperature"),
        # As published: at the network's weights, with the precision that the marginal likelihood prefers.
        step("fit-laplace", "la", center="checkpoint", prior_precision="marglik", structure=structure),
        step("fit-laplace", "mode", prior_precision=prior, structure=structure),
        _refine("refined", lengths, prior=prior, **training),
        # From the prior instead: what a flow does that does not start from an approximation of the posterior.
        _refine("naive", lengths, base="prior", prior=prior, **training),
        _hmc("hmc", **sampler),
        # The same with another seed: the distance of two samples of one posterior.
        _hmc("hmc-again", **sampler, seed=777),
        step("predict", posterior=["map", "temperature", "{la}", "{mode}", "{refined*}", "{naive*}", "{hmc}", "{hmc-again}"]),
        # Published: 20 draws of each approximation; many of Laplace beside few of HMC; none.
        step("predict", "few", posterior=[["{la}"], ["{mode}"], ["{refined}"], ["{naive}"]], integrator="mc", samples=20),
        step("predict", "many", posterior=[["{la}"]], integrator="mc", samples=10000, split="test"),
        step("predict", "ten", posterior=[["{la}"], ["{hmc}"]], integrator="mc", samples=10, split="test"),
        step("predict", "probit", posterior=[["{la}"], ["{mode}"]], integrator="probit", split="test"),
        # With correlations over examples, so that differences of posteriors are those of pairs.
        *_score(scale, scores, split="test"),
    ]


def _score(scale: str, scores: list[str] = SCORES, **evaluated: Any) -> list[Step]:
    bootstrap = 200 if scale == "quick" else 1000
    return [step("evaluate", **evaluated, bootstrap=bootstrap), step("compare", metric=scores, bootstrap=bootstrap)]


@study("fmnist-last-layer", "The last layer of LeNet-5 on Fashion-MNIST: Laplace as published, radial refinements of it, HMC, and the "
       "Gaussian at the mode", seconds=90,
       quick=needs(QUICK_FMNIST, mnist="fixtures/mnist.npz",
                   optional={"kmnist": "data/kmnist-test.npz", "emnist": "data/emnist-digits-test.npz"}),
       paper=needs(PAPER_FMNIST, optional={"mnist": "data/mnist-test.npz", "kmnist": "data/kmnist-test.npz",
                                           "emnist": "data/emnist-digits-test.npz"}))
def fmnist_last_layer(scale: str, files: Files) -> Grid:
    """Take the published prior precision, 510, which val prefers with 60,000 examples; of the small network val prefers 1,000."""
    checkpoints, data, hold_out = _fmnist(scale, files)
    limit, prior = ("@1000", 1000) if scale == "quick" else ("", 510)
    extract = {"model": "lenet5", "model_arg": [], "data": data, "hold_out": hold_out,
               "ood": _npz(files, mnist="", kmnist=limit, emnist=limit)}
    return checkpoints, _last_layer(scale, extract=extract, prior=prior, training=TRAININGS[scale], scores=[*SCORES, "fpr95"])


OTHERS = {"svhn": "data/svhn-test.npz", "lsun": "data/lsun-val.npz"}


@study("cifar10-last-layer", "The same of a WideResNet-16-4 on CIFAR-10; at quick of a public ResNet-20", seconds=90,
       quick=needs(RESNET20_FILES, optional={**OTHERS, "cifar100": "data/cifar100-test5k.npz"}),
       paper=needs(WIDE_RESNET_FILES, optional={**OTHERS, "cifar100": "data/cifar100-test.npz"}))
def cifar10_last_layer(scale: str, files: Files) -> Grid:
    if scale == "quick":
        extract = {"model": RESNET20["model"], "model_arg": [], "mean": RESNET20["mean"], "std": RESNET20["std"],
                   "data": _npz(files, train="@2000", test=""), "hold_out": ["val=test:2000"],
                   "ood": _npz(files, svhn="", lsun="", cifar100="@2000")}
        return [str(files["net"])], _last_layer(scale, extract=extract, prior=10, training=TRAININGS[scale])
    extract = _wide_resnet(files, classes=10) | {"ood": _npz(files, svhn="", lsun="", cifar100="")}
    return [str(files["net"])], _last_layer(scale, extract=extract, prior=40)


CIFAR100 = needs(net="checkpoints/wrn16-4-cifar100.pt", train="data/cifar100-train.npz", test="data/cifar100-test.npz",
                 optional={**OTHERS, "cifar10": "data/cifar10-test.npz"})


@study("cifar100-last-layer", "The same of a WideResNet-16-4 on CIFAR-100", quick=CIFAR100, paper=CIFAR100)
def cifar100_last_layer(scale: str, files: Files) -> Grid:
    limit = "@2000" if scale == "quick" else ""
    extract = _wide_resnet(files, classes=100, limit=limit) | {"ood": _npz(files, svhn="", lsun="", cifar10="")}
    return [str(files["net"])], _last_layer(scale, extract=extract, prior=40, structure="diag")


def _wide_resnet(files: Files, *, classes: int, limit: str = "") -> dict[str, Any]:
    """Return options of extract-features for a WideResNet-16-4 on CIFAR."""
    return {"model": "wide-resnet", "model_arg": ["depth=16", "width=4", f"classes={classes}"],
            "data": _npz(files, train=limit, test=""), "hold_out": ["val=test:2000"]}


REVIEWS = needs(net="checkpoints/minilm-reviews", train="data/reviews-train.csv", test="data/reviews-test.csv")


@study("reviews-last-layer", "The same of a sentence encoder on movie reviews", quick=REVIEWS, paper=REVIEWS)
def reviews_last_layer(scale: str, files: Files) -> Grid:
    limit, held_out = ("@2000", 500) if scale == "quick" else ("", 2000)
    extract = {"model": f"hf:{files['net']}", "model_arg": [],
               "data": [f"train=csv:{files['train']}{limit}", f"test=csv:{files['test']}{limit}"],
               "hold_out": [f"val=test:{held_out}"], "ood": []}
    return ["reviews"], _last_layer(scale, extract=extract, prior=40)


REFERENCE = {"reference": "data/cifar10-test-hmc.npz"}


@study("cifar10-resnet20", "The last layer of a public ResNet-20 on CIFAR-10, beside full-batch HMC of another ResNet-20", seconds=36,
       quick=needs(RESNET20_FILES, REFERENCE),
       paper=needs(RESNET20_FILES | {"train": "data/cifar10-train.npz"}, REFERENCE))
def cifar10_resnet20(scale: str, files: Files) -> Grid:
    """Take prior precision 40, the refinement paper's for CIFAR-10; of 2,000 examples val prefers one near 10."""
    limit, prior = ("@2000", 10) if scale == "quick" else ("@50000", 40)
    return [str(files["net"])], [
        step("extract-features", **RESNET20, data=_npz(files, train=limit, test=""), hold_out="val=test:2000"),
        step("fit-temperature"),
        step("fit-laplace", "la", center="checkpoint", prior_precision="marglik", structure="full"),
        step("fit-laplace", "mode", prior_precision=prior, structure="full"),
        _refine("refined", 5, prior=prior, **TRAININGS[scale]),
        _hmc("hmc", **SAMPLERS[scale]),
        step("predict", posterior=["map", "temperature", "{la}", "{mode}", "{refined}", "{hmc}"], split="test"),
        *_score(scale, reference=f"{files['reference']}:hmc"),
    ]


# Shifts that grow.


def _shifted(scale: str, *, prior: float, splits: list[str]) -> list[Step]:
    """Fit the posteriors of figure 8 and predict every split; refinement by 30 layers at paper alone."""
    lengths = [5] if scale == "quick" else [5, 30]
    refined = [f"{{refined-{length}}}" for length in lengths]
    return [
        step("fit-temperature"),
        step("fit-laplace", "la", center="checkpoint", prior_precision="marglik"),
        step("fit-laplace", "mode", prior_precision=prior),
        *(_refine(f"refined-{length}", length, prior=prior, **TRAININGS[scale]) for length in lengths),
        _hmc("hmc", **SAMPLERS[scale]),
        step("predict", posterior=["map", "temperature", "{la}", "{mode}", *refined, "{hmc}"], split=splits),
    ]


@study("fmnist-rotations", "Rotated Fashion-MNIST: the last layer of LeNet-5 under a shift that grows", seconds=25,
       quick=needs(QUICK_FMNIST), paper=needs(PAPER_FMNIST))
def fmnist_rotations(scale: str, files: Files) -> Grid:
    """Leave the rows of val out of every rotated test set: the published experiment has one split for all angles."""
    checkpoints, data, hold_out = _fmnist(scale, files)
    angles = [angle for angle in ANGLES if scale == "paper" or angle % 30 == 0]
    rotated = [
        step("extract-features", f"rot{angle}", model="lenet5", data=f"rot{angle}=npz:{files['test']}", rotate=angle,
             hold_out=[f"rest{angle}=rot{angle}:2000"] if scale == "paper" else [])
        for angle in angles
    ]
    splits = [f"rot{angle}" for angle in angles]
    return checkpoints, [
        step("extract-features", model="lenet5", data=data, hold_out=hold_out),
        *rotated,
        *_shifted(scale, prior=1000 if scale == "quick" else 510, splits=["test", *splits]),
        step("compare", metric=SHIFTED_SCORES, bootstrap=100),
        *(step("compare", f"compare-{split}", split=split, metric=SHIFTED_SCORES, bootstrap=100) for split in splits),
    ]


def random_rows(scale: str, files: Files) -> Mapping[str, NDArray[Any]]:
    """Draw two splits of a test set whose rows are sorted, the same for every copy of it: x_val, y_val, x_test, y_test.

    Raises:
        DataError: it has too few rows.
    """
    num_val, num_test = (500, 500) if scale == "quick" else (2000, 8000)
    with np.load(files["test"]) as arrays:
        images, labels = arrays["x"], arrays["y"]
    if len(labels) < num_val + num_test:
        raise DataError(f"{files['test']}: expected at least {num_val + num_test} rows, got {len(labels)}")
    order = np.random.default_rng(0).permutation(len(labels))
    val, test = np.sort(order[:num_val]), np.sort(order[num_val : num_val + num_test])
    return {"x_val": images[val], "y_val": labels[val], "x_test": images[test], "y_test": labels[test]}

@study("cifar10-corruptions", "Corrupted CIFAR-10: last layers under generated corruptions", seconds=38, prepare=random_rows,
       quick=needs(RESNET20_FILES), paper=needs(WIDE_RESNET_FILES))
def cifar10_corruptions(scale: str, files: Files) -> Grid:
    """At quick take a public ResNet-20, whose inputs are normalised; of 2,000 examples val prefers prior precision 10."""
    if scale == "quick":
        network: dict[str, Any] = {"model": "resnet20", "model_arg": [], "mean": RESNET20["mean"], "std": RESNET20["std"]}
        kinds, severities, num_train, prior = QUICK_CORRUPTIONS, range(1, 6, 2), 2000, 10
    else:
        network = {"model": "wide-resnet", "model_arg": ["depth=16", "width=4", "classes=10"], "mean": "0,0,0", "std": "1,1,1"}
        kinds, severities, num_train, prior = CORRUPTIONS, SEVERITIES, 50000, 40
    test = f"npz:{files['arrays']}:x_test,y_test"
    data = [f"train=npz:{files['train']}@{num_train}", f"val=npz:{files['arrays']}:x_val,y_val", f"test={test}"]
    splits = {f"{kind}-{severity}": f"{kind}:{severity}" for kind in kinds for severity in severities}
    return [str(files["net"])], [
        step("extract-features", **network, data=data),
        *(step("extract-features", name, **network, data=f"{name}={test}", corrupt=one) for name, one in splits.items()),
        *_shifted(scale, prior=prior, splits=["test", *splits]),
        step("evaluate", bootstrap=100),
    ]


# All layers, and answers of several classes.


@study("fmnist-all-layers", "All layers of an MLP on Fashion-MNIST: a diagonal Laplace approximation, radial refinements of it, HMC",
       seconds=45, quick=needs(QUICK_FMNIST | {"net": "checkpoints/mlp10-fmnist.safetensors"}),
       paper=needs(net="checkpoints/mlp-fmnist.safetensors", train="data/fmnist-train.npz", test="data/fmnist-test.npz"))
def fmnist_all_layers(scale: str, files: Files) -> Grid:
    """Take the published prior, weight decay times examples: 5e-4 * 60,000, and 0.03 * 1,000 of the small network."""
    if scale == "quick":
        hidden, data, hold_out = 10, _npz(files, train="@1000", val="", test=""), []
        rate, warmup, draws, samples = 0.01, 30, 30, 100
    else:
        hidden, data, hold_out = 50, _npz(files, train="", test=""), ["val=test:2000"]
        rate, warmup, draws, samples = 0.001, 100, 200, 1000
    whole, network = {"layers": "all", "structure": "diag"}, ["inputs=784", f"hidden={hidden}"]
    return [str(files["net"])], [
        step("extract-features", model="mlp", model_arg=network, data=data, hold_out=hold_out),
        # As published: at the network's weights, with the precision that predicts held-out data best.
        step("fit-laplace", "la", **whole, center="checkpoint", prior_precision="val"),
        # The control, in the target's own prior.
        step("fit-laplace", "mode", **whole, center="mode", prior_precision=30),
        _refine("refined", [1, 5, 10, 30], prior=30, epochs=20, learning_rate=rate),
        step("hmc", "hmc", layers="all", base="{mode}", prior_precision="inherit", chains=4, warmup=warmup, draws=draws),
        step("predict", posterior=["{la}", "{mode}", "{refined*}", "{hmc}"], integrator="mc", samples=samples, split="test"),
        # Published: 20 draws of each approximation.
        step("predict", "few", posterior=[["{la}"], ["{refined}"]], integrator="mc", samples=20, split="test"),
        *_score(scale),
    ]


@study("fmnist-top-k", "How many classes the last layer of LeNet-5 on Fashion-MNIST cannot tell apart", seconds=8,
       quick=needs(QUICK_FMNIST), paper=needs(PAPER_FMNIST))
def fmnist_top_k(scale: str, files: Files) -> Grid:
    checkpoints, data, hold_out = _fmnist(scale, files)
    bridge: dict[str, Any] = {"posterior": [["{la}"]], "integrator": "bridge"}
    return checkpoints, [
        step("extract-features", model="lenet5", data=data, hold_out=hold_out),
        # As published, a diagonal Gaussian over the last layer.
        step("fit-laplace", "la", center="checkpoint", prior_precision="marglik", structure="diag"),
        step("predict", posterior="map", split="test"),
        # The algorithm as printed compares neighbours, the released code each class with the first.
        step("predict", "neighbor", **bridge, top_k="neighbor", split="test"),
        step("predict", "best", **bridge, top_k="best", split="test"),
        # The bridge of the logits' own variances, as published.
        step("predict", "published", **bridge, projection="none", top_k="neighbor", split="test"),
        # Logits of large variance shrunk first.
        step("predict", "normalized", **bridge, normalize=True, top_k="neighbor", split="test"),
        step("evaluate", split="test", bootstrap=200 if scale == "quick" else 1000),
    ]


# Latent binary networks.


def _lbbnn(name: str, scale: str, files: Files) -> Grid:
    """Fit latent binary networks by three estimators; of the other set, whose labels are no classes, only entropies are used."""
    if scale == "quick":
        data, epochs, few_epochs, slow_rate = _npz(files, train="@2000", test="@500", other="@500"), 4, 1, 0.001
    else:
        data, epochs, few_epochs, slow_rate = _npz(files, train="", test="", other=""), 250, 10, 0.0001

    def fit(called: str, estimator: str, rate: float, *, variance: str | None = None, epochs: int = epochs) -> Step:
        flow_rate = rate if estimator == "mnf" else None
        return step("fit-lbbnn", called, hidden="400,600", estimator=estimator, variance=variance, slab_sd=1, epochs=epochs,
                    learning_rate=rate, flow_rate=flow_rate)

    fits = [
        fit("lrt", "lrt", 0.001),
        fit("mnf", "mnf", slow_rate),
        fit("concrete", "concrete", slow_rate),
        fit("mnf-short", "mnf", slow_rate, epochs=few_epochs),
        # Activations with the variance of the released code, which is not that of the weights that are drawn.
        fit("lrt-published", "lrt", 0.001, variance="published"),
        fit("mnf-published", "mnf", slow_rate, variance="published"),
    ]
    predict = step("predict", posterior=[f"{{{one['name']}}}" for one in fits], integrator=["mean", "mc"], samples=10,
                   split=["test", "other"], table=f"{files['folder']}/predictions.npz")
    extract = step("extract-features", model="flatten", data=data)
    return [name], [extract, *fits, predict, step("evaluate", bootstrap=50 if scale == "quick" else 1000)]


def _lbbnn_study(name: str, other: str, title: str) -> Study:
    found = needs(train=f"data/{name}-train.npz", test=f"data/{name}-test.npz", other=f"data/{other}-test.npz")
    return study(f"lbbnn-{name}", title, seconds=35, quick=found, paper=found)(lambda scale, files: _lbbnn(name, scale, files))


lbbnn_mnist = _lbbnn_study("mnist", "fmnist", "Latent binary networks on MNIST: three estimators")
lbbnn_fmnist = _lbbnn_study("fmnist", "mnist", "The same on Fashion-MNIST")
lbbnn_kmnist = _lbbnn_study("kmnist", "mnist", "The same on Kuzushiji-MNIST")


def simulated_rows(scale: str, files: Files) -> Mapping[str, NDArray[Any]]:
    """Return features, labels and a head of one logit for extract-features.

    Skaaret-Lund (2022), section 5.2; example 3 of github.com/aliaksah/EMJMCMC2016. Columns 7 to 20 are standardised, as in the
    published fit with normalizing flows; the first six are binary. The split `test` is a part of the same rows: what is scored is the
    selection of inputs, which no prediction changes.

    Raises:
        DataError: the files are not those 2,000 rows of 20 columns with a response of 0 and 1.
    """
    shape, num_binary, num_test = (2000, 20), 6, 200
    try:
        columns = np.loadtxt(files["columns"], delimiter=",", ndmin=2)
        labels = np.loadtxt(files["response"]).astype(np.int64)
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{files['columns']}: expected comma-separated numbers: {error}") from None
    if columns.shape != shape or labels.shape != shape[:1] or not np.isin(labels, (0, 1)).all():
        said = f"{columns.shape} columns, {labels.shape} responses"
        raise DataError(f"{files['columns']}: expected {shape} columns and one response of 0 or 1 per row; got {said}")
    scaled = columns.copy()
    scaled[:, num_binary:] -= columns[:, num_binary:].mean(axis=0)
    scaled[:, num_binary:] /= columns[:, num_binary:].std(axis=0, ddof=1)
    features = scaled.astype(np.float32)
    head: dict[str, NDArray[Any]] = {"head_weight": np.zeros((1, shape[1]), dtype=np.float32), "head_bias": np.zeros(1, dtype=np.float32)}
    test: dict[str, NDArray[Any]] = {"features_test": features[:num_test], "labels_test": labels[:num_test]}
    return {"features_train": features, "labels_train": labels, **test, **head}


SIMULATED = needs(columns="data/sim3-X.txt", response="data/sim3-Y.txt")


@study("simulation-study", "Variable selection by latent binary networks on the simulated logistic data", seconds=35,
       quick=SIMULATED, paper=SIMULATED, prepare=simulated_rows)
def simulation_study(scale: str, files: Files) -> Grid:
    """Fit as the released code does, whose prior is not that of the text."""
    repeats, epochs = (10, 300) if scale == "quick" else (100, 500)
    flow: dict[str, Any] = {"flow_length": 2, "flow_hidden": "50,50,50,50,50"}
    prior: dict[str, Any] = {"prior_inclusion": 0.3, "slab_mean": 0.1, "slab_sd": 1.3, "bias_sd": 1.3,
                             "start_inclusion": "1.5,2.5", "learning_rate": 0.01}
    rest: dict[str, Any] = {"batch_size": 400, "no_shuffle": True, "epochs": epochs, "repeats": repeats}
    return ["simulated"], [
        step("extract-features", from_npz=str(files["arrays"])),
        step("fit-lbbnn", "mnf-published", estimator="mnf", variance="published", **flow, **prior, flow_rate=0.004, **rest),
        # The same with the variance that such weights have.
        step("fit-lbbnn", "mnf", estimator="mnf", **flow, **prior, flow_rate=0.004, **rest),
        # Relaxed inclusions, by Adam at a temperature of 0.5.
        step("fit-lbbnn", "concrete", estimator="concrete", **prior, **rest),
        step("predict", posterior=["{mnf-published}", "{mnf}", "{concrete}"], integrator="mean", split="test"),
        step("evaluate", true_inputs="1,3,7,11,13,16,17,18,19", bootstrap=0),
    ]
