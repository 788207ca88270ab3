"""The command lines of the recorded runs, in the order they are run, and the small inputs that they read.

Budgets are tiny on purpose: a few epochs and draws, so that the whole takes seconds and so that rounding, which differs
between processors and releases of torch, has no time to grow into other decisions (an accepted draw, an early end).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parents[1] / "fixtures"

# How far numbers may lie from the recorded ones, relative to the size of the tensor or to the number itself (at least 1).
ROUNDED = 1e-6  # sums in float64, or float32 numbers that are copied or averaged
SOLVED = 2e-5  # float32 arithmetic: convolutions, Newton's method, Cholesky factors, and what predicts with them
SEARCHED = (
    2e-3  # a prior precision is searched for until steps are small, and a Newton decrement at the mode is rounding
)
TRAINED = 2e-3  # steps of Adam or of leapfrog: Adam divides by the root of small gradients, which makes rounding larger
CHAINED = 2e-2  # some hundred steps of chains over all layers, and an R-hat of four draws

AMPLIFIED = (
    0.5  # Adam on gradients that are rounding alone: the first steps of a Householder flow from where it does nothing
)


@dataclass(frozen=True)
class Line:
    """One command line, what happens in the folder before it, and how closely its numbers must agree."""

    words: str
    tolerance: float = ROUNDED
    before: Callable[[], None] | None = None
    is_help: bool = False  # only the names of the commands are kept of its stdout

    @property
    def argv(self) -> list[str]:
        """The words as they are handed to the command line; what computes does so on the CPU."""
        words = shlex.split(self.words)
        return [*words, "--device", "cpu"] if words[0] in COMPUTING and "--device" not in words else words


COMPUTING = {
    "train",
    "fit-ensemble",
    "extract-features",
    "fit-laplace",
    "fit-temperature",
    "fit-calibration",
    "stack",
    "refine",
    "hmc",
    "fit-lbbnn",
    "fit-sghmc",
    "fit-swag",
    "fit-vi",
    "prune",
    "predict",
    "evaluate",
    "diagnose",
    "integrals",
    "sbc",
    "report",
    "auto",
    "merge",
    "export",
    "calibrate",
    "monitor",
}


def make_inputs() -> None:
    """Every input file of the lines, in the current folder."""
    np.savez("small.npz", **_classes(seed=0, counts=(240, 80, 120), num_classes=3, num_features=5))
    np.savez("other.npz", **_classes(seed=1, counts=(240, 80, 120), num_classes=3, num_features=5))
    np.savez("wide.npz", **_classes(seed=2, counts=(20, 40, 30), num_classes=3, num_features=30))
    np.savez("pair.npz", **_one_logit())
    for split, count in (("train", 120), ("test", 100), ("mnist", 40)):
        with np.load(FIXTURES / f"{split}.npz") as arrays:
            np.savez(f"{split}.npz", x=arrays["x"][:count], y=arrays["y"][:count])
            np.savez(f"coarse-{split}.npz", x=arrays["x"][:count, ::5, ::5], y=arrays["y"][:count])
    Path("net.pt").write_bytes((FIXTURES / "lenet5-fmnist.pt").read_bytes())
    _save_tiny_network()
    _save_predictions()
    Path("costs.csv").write_text("class,0,1,2,ask\n0,0,1,1,0.2\n1,3,0,1,0.2\n2,1,1,0,0.2\n")
    Path("bad.toml").write_text("[refine]\nepoks = 3\n")
    Path("good.toml").write_text('[common]\nquiet = true\n[refine]\nflow = "radial"\nlength = 3\n')


def _save_predictions() -> None:
    """Those of three classes that somebody made, as a table and as an archive of two."""
    generator = np.random.default_rng(5)
    probs = generator.dirichlet(np.ones(3), size=(2, 90))
    labels = [generator.choice(["cat", "dog", "elk"], p=row) for row in probs[0]]
    sites = ["north" if number % 3 else "south" for number in range(90)]
    rows = [",".join([*map(repr, row.tolist()), *names]) for row, *names in zip(probs[0], labels, sites, strict=True)]
    Path("mine.csv").write_text("\n".join(["p_cat,p_dog,p_elk,label,site", *rows]) + "\n")
    np.savez("mine.npz", own=probs[0], other=probs[1])


def _save_tiny_network() -> None:
    """A built-in mlp of few parameters, with weights that are no more random than these numbers."""
    import torch

    generator = np.random.default_rng(4)
    shapes = {"features.0.weight": (3, 36), "features.0.bias": (3,), "ll.weight": (10, 3), "ll.bias": (10,)}
    arrays = {name: generator.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()}
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, "tiny.pt")


def _classes(seed: int, counts: tuple[int, int, int], num_classes: int, num_features: int) -> dict[str, np.ndarray]:
    """Overlapping Gaussian classes with a head that fits them, and unlabelled far features."""
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(num_classes, num_features)) * np.sqrt(5 / num_features)
    arrays: dict[str, np.ndarray] = {}
    for split, count in zip(("train", "val", "test"), counts, strict=True):
        labels = generator.integers(num_classes, size=count)
        features = centers[labels] + generator.normal(size=(count, num_features))
        arrays |= {f"features_{split}": features.astype(np.float32), f"labels_{split}": labels.astype(np.int64)}
    arrays["features_far"] = (3 * generator.normal(size=(40, num_features))).astype(np.float32)
    arrays["head_weight"] = (2 * centers).astype(np.float32)
    arrays["head_bias"] = (-(centers**2).sum(axis=1)).astype(np.float32)
    return arrays


def _one_logit() -> dict[str, np.ndarray]:
    """Two classes by one logit, of which two inputs of six matter."""
    generator = np.random.default_rng(3)
    weight = np.array([2.0, 0.0, -1.5, 0.0, 0.0, 0.0])
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", 150), ("val", 50), ("test", 60)):
        features = generator.normal(size=(count, 6))
        labels = generator.random(count) < 1 / (1 + np.exp(-features @ weight))
        arrays |= {f"features_{split}": features.astype(np.float32), f"labels_{split}": labels.astype(np.int64)}
    return arrays | {"head_weight": weight[None].astype(np.float32), "head_bias": np.zeros(1, np.float32)}


def _cut_short() -> None:
    whole = Path("wide.bnn/features/val.h5").read_bytes()
    Path("wide.bnn/features/val.h5").write_bytes(whole[:-100])


def _leave_a_temporary() -> None:
    Path("wide.bnn/posteriors/.laplace.safetensors.999999999.00000000.tmp").write_bytes(b"half")


SCORES = "evaluate small --posterior laplace --integrator mc --bootstrap 50 --neighbors 5"
REFINE = "refine small --epochs 2 --elbo-draws 64"
TRAIN = "--recipe mlp-fmnist --model-arg inputs=36 --data train=npz:coarse-train.npz --epochs 2"
LBBNN = "fit-lbbnn small --epochs 2 --slab-sd 1"

LINES = (
    Line("--help", is_help=True),
    Line("help exit-codes"),
    # Features: of arrays, of a network, of the inputs themselves.
    Line("extract-features small --from-npz small.npz --ood far"),
    Line(
        "extract-features net.pt --model lenet5 --data train=npz:train.npz --data test=npz:test.npz@80 --hold-out val=test:30 --ood mnist=npz:mnist.npz --json",
        SOLVED,
    ),
    Line(
        "extract-features flat --model flatten --data train=npz:coarse-train.npz --data test=npz:coarse-test.npz --ood mnist=npz:coarse-mnist.npz"
    ),
    Line("extract-features wide --from-npz wide.npz --ood far --dtype float16"),
    Line("extract-features pair --from-npz pair.npz"),
    # Gaussians: every structure, centre and way to choose the prior precision; few examples of many features; one logit.
    Line("fit-laplace small --structure full --prior-precision 10", SOLVED),
    Line("fit-laplace small --structure block --name block --json", SEARCHED),
    Line("fit-laplace small --structure kron --name kron --prior-precision marglik", SEARCHED),
    Line("fit-laplace small --structure diag --name diag --center checkpoint --prior-precision 5", SOLVED),
    Line("fit-laplace small --name chosen --bias-precision 0.1 --plot prior.png --json", SEARCHED),
    Line("fit-laplace wide --structure full --prior-precision 5", SOLVED),
    Line("fit-laplace pair --prior-precision 1", SOLVED),
    Line("fit-laplace net.pt --structure kron --prior-precision 50", SOLVED),
    # Posteriors over other layers than the last.
    Line(
        "extract-features tiny.pt --model mlp --model-arg inputs=36 --model-arg hidden=3 --data train=npz:coarse-train.npz --data test=npz:coarse-test.npz@60 --hold-out val=test:30",
        SOLVED,
    ),
    Line("fit-laplace tiny.pt --layers all --structure diag --prior-precision 20 --json", SOLVED),
    Line("fit-laplace tiny.pt --layers features --structure full --prior-precision 20 --name first", SOLVED),
    Line("fit-laplace tiny.pt --layers all --structure ekfac --prior-precision 20 --name ekfac", SOLVED),
    Line(
        "fit-laplace tiny.pt --layers features --structure low-rank --rank 5 --prior-precision 20 --name low-rank",
        SOLVED,
    ),
    Line(
        "fit-laplace tiny.pt --layers all --structure subnetwork --size 5 --prior-precision 20 --name some",
        TRAINED,  # five variances change the predictions by 4e-5, of which a p-value is told
    ),
    Line("fit-laplace tiny.pt --layers all --structure diag --draws 4 --prior-precision 20 --name drawn", SOLVED),
    Line(
        "predict tiny.pt --posterior laplace-all --posterior first --samples 20 --split test --integrator logit-mc --integrator mc",
        SOLVED,
    ),
    Line("diagnose tiny.pt --posterior laplace-all --posterior first --posterior map --draws 32", TRAINED),
    Line("fit-temperature small", SOLVED),
    Line("stack small --json", SOLVED),
    Line("fit-calibration small --json", SOLVED),
    Line("fit-calibration small --map isotonic", SOLVED),
    Line("fit-temperature small --base laplace --name cooled --json", SOLVED),
    # Flows.
    Line(f"{REFINE} --json", TRAINED),
    Line(f"{REFINE} --flow affine --scale block --name affine-block", TRAINED),
    Line(f"{REFINE} --flow affine --scale low-rank --rank 2 --name affine-low-rank", TRAINED),
    Line(f"{REFINE} --flow householder --name householder", AMPLIFIED),
    Line(f"{REFINE} --flow iaf --hidden 8 --name iaf", TRAINED),
    Line(f"{REFINE} --flow planar --name planar --base diag", TRAINED),
    Line(f"{REFINE} --flow radial --length 2 --batch-size 64 --name radial", TRAINED),
    Line(f"{REFINE} --flow realnvp --hidden 8 --name realnvp", TRAINED),
    Line(f"{REFINE} --flow spline --hidden 8 --name spline", TRAINED),
    Line(f"{REFINE} --flow sylvester --rank 2 --name sylvester --space weight", TRAINED),
    Line(f"{REFINE} --flow radial --length 1 --base prior --name naive", TRAINED),
    # Draws.
    Line("hmc small --chains 4 --warmup 4 --draws 10", TRAINED),
    Line(
        "hmc small --chains 4 --warmup 4 --draws 8 --dynamics leapfrog --name plain --max-rhat 1.0001 --json", TRAINED
    ),
    Line("hmc pair --chains 4 --warmup 4 --draws 8 --until 'rhat<=1.0001' --max-draws 12", TRAINED),
    Line("fit-sghmc small --chains 2 --epochs 40 --json", TRAINED),
    Line(
        "fit-sghmc small --sampler sgld --chains 2 --epochs 12 --batch-size 60 --preconditioner rmsprop --name sgld",
        TRAINED,
    ),
    Line("fit-sghmc tiny.pt --layers all --chains 2 --epochs 20 --batch-size 40", CHAINED),
    Line("fit-swag small --warmup 2 --epochs 6 --rank 4 --json", TRAINED),
    Line("fit-swag tiny.pt --layers all --warmup 1 --epochs 4 --rank 3", TRAINED),
    Line("fit-vi small --epochs 4 --elbo-draws 32 --json", TRAINED),
    Line("fit-vi small --epochs 4 --batch-size 60 --estimator flipout --elbo-draws 32 --name flipout", TRAINED),
    Line("fit-vi small --epochs 4 --optimizer ivon --kl-weight 0.5 --elbo-draws 32 --name ivon", TRAINED),
    Line("hmc small --chains 4 --warmup 10 --draws 20 --seed 1 --name one", SOLVED),
    Line("hmc small --chains 4 --warmup 10 --draws 20 --seed 2 --name two", SOLVED),
    Line("merge small --posterior one --posterior two --json", SOLVED),
    Line("fit-vi tiny.pt --layers all --epochs 2 --elbo-draws 8", TRAINED),
    # Latent binary networks: every estimator, variance and prior.
    Line(LBBNN, TRAINED),
    Line(f"{LBBNN} --estimator mnf --flow-hidden 8,8 --name mnf", TRAINED),
    Line(f"{LBBNN} --estimator concrete --name concrete --json", TRAINED),
    Line("fit-lbbnn small --epochs 1 --variance published --prior-inclusion 0.3 --name published", TRAINED),
    Line("fit-lbbnn flat --epochs 1 --hidden 6", TRAINED),
    Line("fit-lbbnn pair --epochs 3 --repeats 2 --standardize --slab-sd 2 --no-shuffle", TRAINED),
    Line("predict small --posterior sghmc --posterior swag --posterior vi --samples 20 --split test", TRAINED),
    Line("diagnose small --posterior swag --posterior vi --posterior sghmc --draws 64", TRAINED),
    Line("refine small --base swag --flow radial --length 1 --epochs 1 --elbo-draws 64 --name refined-swag", TRAINED),
    Line("prune small --json", TRAINED),
    Line("prune flat --rule density --density 0.2 --dense dense.safetensors", TRAINED),
    # Predictions: every integrator, its settings, tables.
    Line("predict small --posterior map --posterior laplace --samples 20 --dry-run --json"),
    Line("predict small --posterior map --posterior laplace --samples 20 --split test --split far", SOLVED),
    Line("predict small --posterior laplace --integrator all --samples 20 --split test", SOLVED),
    Line(
        "predict small --posterior refine --posterior hmc --posterior lbbnn --posterior lbbnn-sparse --posterior temperature"
        " --samples 20 --split test",
        TRAINED,
    ),
    Line(
        "predict small --posterior laplace --integrator logit-mc --qmc --samples 16 --keep-samples --split val", SOLVED
    ),
    Line(
        "predict small --posterior block --integrator mean-field --order 2 --integrator probit --projection sum-zero"
        " --split test --json",
        SEARCHED,
    ),
    Line(
        "predict small --posterior kron --integrator bridge --normalize --top-k best --merge first=0,1 --probabilities"
        " --table bridge.csv --split test",
        SEARCHED,
    ),
    Line("predict small --posterior lbbnn --integrator mean --split test", TRAINED),
    Line(
        "predict pair --posterior laplace --integrator quadrature --integrator bridge --integrator mc --samples 20 --split test",
        SOLVED,
    ),
    Line("predict pair --posterior map --posterior lbbnn --samples 20 --split test --table table.npz", TRAINED),
    Line("predict wide --samples 20 --posterior laplace --split test", SOLVED),
    Line("predict flat --samples 10 --split test", TRAINED),
    Line("predict net.pt --samples 20 --posterior laplace --split test --split mnist", SOLVED),
    # Files that predict by themselves.
    Line("export small --posterior laplace --draws 15 --head-only --format torch", SOLVED),
    Line(
        "export small --posterior block --integrator bridge --head-only --format torch --score entropy --quiet",
        SEARCHED,
    ),
    # Scores.
    Line(f"{SCORES} --score all", SOLVED),
    Line("evaluate small --posterior hmc --bootstrap 0", TRAINED),
    Line("evaluate pair --posterior lbbnn --bootstrap 50 --split test --true-inputs 1,3 --per-class --json", TRAINED),
    Line(
        "evaluate net.pt --posterior laplace --split test --bootstrap 50 --intervals --plot figures --level 0.9 --bins 10",
        SOLVED,
    ),
    Line(f"{SCORES} --score all --assert 'laplace.mc.nll<=0.01'"),
    Line(
        "evaluate small --posterior laplace --integrator probit --reference laplace.mc --split test --bootstrap 50 --json --assert 'agreement-excess>=-0.1'",
        SOLVED,
    ),
    Line(
        "score small.bnn/predictions/laplace.mc/test.h5 --ood small.bnn/predictions/laplace.mc/far.h5 --score all --bootstrap 50 --json",
        SOLVED,
    ),
    Line(
        "score mine.csv --groups site --intervals --per-class --assert 'accuracy@north>=0.1' --reference mine.npz:other"
    ),
    Line("score mine.csv --fit-calibration platt --out map.safetensors --bootstrap 0"),
    Line("score mine.csv --calibration map.safetensors --out calibrated.csv --bootstrap 0 --json"),
    Line("compare small --bootstrap 100", TRAINED),
    Line(
        "compare small --bootstrap 100 --posterior map --posterior laplace --integrator plug-in --integrator probit --baseline map --metric nll --metric auroc:far --json",
        TRAINED,
    ),
    Line(
        "compare small pair --posterior map --posterior laplace --integrator plug-in --metric nll --metric accuracy --format csv",
        SOLVED,
    ),
    Line("compare net.pt --bootstrap 100 --format markdown", SOLVED),
    Line(
        "compare small --bootstrap 100 --metric nll --posterior laplace --posterior swag --posterior hmc --by cost",
        TRAINED,
    ),
    Line("diagnose small --posterior laplace --posterior refine --posterior hmc --posterior map --draws 128", TRAINED),
    Line("diagnose small --posterior laplace --posterior lbbnn --draws 128 --strict --json", TRAINED),
    Line("report small --posterior laplace --posterior hmc --examples 2 --figures drawn --figure-format svg", TRAINED),
    Line("auto wide", TRAINED),
    Line("predict wide --split test", TRAINED),
    Line("sbc small --posterior laplace --simulations 20 --draws 9", SOLVED),
    Line("integrals --mean 2,0,-1 --covariance '2,1,0;1,2,0;0,0,1'", SOLVED),
    Line("integrals --grid-size 3 --samples 20 --json", SOLVED),
    # What is there.
    Line("inspect net.pt"),
    Line("inspect small.bnn/posteriors/laplace.safetensors", SEARCHED),
    Line("inspect small.bnn/posteriors/hmc.nc --json", TRAINED),
    Line("status small"),
    Line("status net.pt --check --json"),
    Line("verify small.bnn/posteriors pair.bnn/features"),
    Line("config show refine --config good.toml"),
    Line("convert net.pt net.safetensors"),
    # Again, and after a change.
    Line("fit-laplace small --structure full --prior-precision 10"),
    Line("evaluate pair --posterior lbbnn --bootstrap 50 --split test --true-inputs 1,3", TRAINED),
    Line("fit-laplace small --structure full --prior-precision 11"),
    Line("extract-features small --from-npz other.npz --ood far --force --json"),
    Line("predict small --posterior laplace --samples 20"),
    Line("status small --check"),
    Line("fit-laplace small --structure full --prior-precision 10 --quiet", SOLVED),
    # What is refused.
    Line("fit-laplace absent"),
    Line("predict pair --posterior absent --json"),
    Line("refine small --flow spiral"),
    Line("predict small --integrator spiral"),
    Line("acquire small --pool test --batch 4 --by margin --json", SOLVED),
    Line("acquire small --pool test --batch 4 --by batchbald --samples 20 --table next.csv", SOLVED),
    Line("fit-laplace small --structure spiral"),
    Line("evaluate small --score spiral"),
    Line("score mine.npz"),
    Line("score mine.csv --labels mine.npz:own"),
    Line("fit-lbbnn small --estimator spiral"),
    Line("refine small --epochs 0"),
    Line("predict pair --posterior laplace --integrator mean"),
    Line("predict pair --posterior laplace --rule spiral"),
    Line("refine small --scale block --flow radial"),
    Line("refine small --config bad.toml"),
    Line("verify wide.bnn", before=_cut_short),
    Line("fit-temperature wide"),
    Line("clean wide --json", before=_leave_a_temporary),
    Line(f"train new.safetensors {TRAIN} --hold-out val=train:20", TRAINED),
    Line(f"train new.safetensors {TRAIN} --hold-out val=train:20 --json", TRAINED),
    Line(f"train new.safetensors {TRAIN}"),
    Line(f"train some.safetensors {TRAIN} --seeds 2 --ema 0.9 --optimizer nesterov --learning-rate 0.1", TRAINED),
    Line("extract-features new.safetensors --data train=npz:coarse-train.npz", TRAINED),
    Line("extract-features some-1.safetensors --data train=npz:coarse-train.npz --state ema", TRAINED),
    Line(
        "extract-features some-0.safetensors --data train=npz:coarse-train.npz --data test=npz:coarse-test.npz", TRAINED
    ),
    Line("fit-ensemble some-0.safetensors some-1.safetensors", TRAINED),
    Line("fit-ensemble some-0.safetensors some-0.safetensors"),
    Line("predict some-0.safetensors --posterior ensemble --split test", TRAINED),
    Line("train new.pt --model mlp --data train=npz:coarse-train.npz"),
    Line("inspect new.safetensors", TRAINED),
    # Decisions, calibrated on a split that chose nothing.
    Line("extract-features sure --from-npz small.npz --ood far --hold-out calib=test:60"),
    Line("fit-laplace sure --prior-precision 10", SOLVED),
    Line("predict sure --samples 20 --posterior laplace", SOLVED),
    Line("calibrate sure --sets raps --coverage 0.8 --risk 0.3 --false-alarm 0.1 --shift-level 0.05 --json", SOLVED),
    Line("calibrate sure --sets lac --class-conditional --coverage 0.7 --name by-class", SOLVED),
    Line("calibrate sure --risk 0.05"),
    Line("calibrate sure --recall 0.7 --precision 0.6 --class 1 --confidence 0.8", SOLVED),
    Line("calibrate sure --recall 0.7"),
    Line("calibrate sure --costs costs.csv", SOLVED),
    Line("calibrate sure --sets lac --shifted-to far --name far"),
    Line("calibrate sure --sets lac --coverage 0.99 --name fine"),
    Line("calibrate sure --sets lac --split val"),
    Line("calibrate sure"),
    Line(
        "evaluate sure --bootstrap 50 --metric set_coverage --metric selective_risk --metric detection_rate --metric shift_p --intervals",
        SOLVED,
    ),
    Line("predict sure --samples 20 --posterior laplace --split test --table night.csv", SOLVED),
    Line("monitor sure --table night.csv --coverage 0.8", SOLVED),
    Line("monitor sure --table night.csv --json", SOLVED),
    Line("monitor sure --max-error 0.5"),
    Line("predict sure --samples 20 --posterior laplace --split far --table far.csv", SOLVED),
    Line("monitor sure --table far.csv --alarm-file ALARM.json --alpha 0.5 --reset", SOLVED),
    Line("predict sure --samples 20 --posterior laplace --table sure.csv", SOLVED),
    Line("inspect sure.bnn/decisions/laplace.mc/sets.safetensors", SOLVED),
    Line("rm sure laplac"),
    Line("rm sure laplace --json"),
)
