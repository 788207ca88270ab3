"""Every option of every command, written once: name, type, default, help, and whether it changes numbers.

The command line, the environment variables, the configuration file and the parameters recorded in artifacts are all
made from these classes. A field named prior_precision is the option --prior-precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.hmc_options import HmcOptions as HmcOptions
from bnncli.laplace_options import FitLaplaceOptions as FitLaplaceOptions
from bnncli.option import Checked, check_artifact_name, option
from bnncli.registry import check_name


@dataclass(frozen=True)
class CommonOptions(Checked):
    """Options of every command: streams, verbosity, configuration."""

    json: bool = option(False, "Print one JSON document on stdout instead of text.", numeric=False, env_common=True)
    quiet: bool = option(False, "Print errors only.", short="-q", numeric=False, env_common=True)
    verbose: int = option(
        0, "Print more; twice for the libraries' own messages.", short="-v", numeric=False, env_common=True
    )
    log_format: str = option(
        "text", "Form of log lines: text or json.", choices=("text", "json"), numeric=False, env_common=True
    )
    log_file: str | None = option(
        None, "Write log lines to this file as well.", metavar="FILE", numeric=False, env_common=True
    )
    progress: str = option(
        "auto",
        "auto (a bar on a terminal, else log lines), bar, log or none.",
        choices=("auto", "bar", "log", "none"),
        numeric=False,
        env_common=True,
    )
    config: str | None = option(
        None,
        "TOML file with defaults [BNNCLI_CONFIG, then ./bnncli.toml].",
        metavar="FILE",
        numeric=False,
        env_common=True,
    )


@dataclass(frozen=True)
class RunOptions(Checked):
    """Options of every command that has a run."""

    run_dir: str | None = option(
        None,
        "The run folder, when it is not CKPT.bnn beside the checkpoint.",
        metavar="DIR",
        numeric=False,
        env_common=True,
    )


@dataclass(frozen=True)
class WriteOptions(Checked):
    """Options of commands that write artifacts."""

    force: bool = option(False, "Recompute, and replace what is there.", short="-f", numeric=False)
    dry_run: bool = option(False, "Say what would be done, and do nothing.", short="-n", numeric=False)


@dataclass(frozen=True)
class LockOptions(Checked):
    """Options of commands that lock what they write."""

    wait: float = option(
        0.0,
        "Seconds to wait for another bnncli that writes the same artifact.",
        minimum=0,
        numeric=False,
        env_common=True,
    )


@dataclass(frozen=True)
class InputOptions(Checked):
    """Options of commands that take artifacts as inputs."""

    allow_stale: bool = option(
        False, "Use an input although what it was made from has changed since; recorded as a warning.", numeric=False
    )


@dataclass(frozen=True)
class ComputeOptions(Checked):
    """Options of commands that compute."""

    seed: int = option(0, "Seed of every random stream.", minimum=0, numeric=False, env_common=True)
    device: str = option(
        "auto", "auto (a GPU where there is one), cpu, cuda or cuda:N.", numeric=False, env_common=True
    )
    threads: int | None = option(None, "CPU threads; all cores by default.", minimum=1, numeric=False, env_common=True)
    deterministic: bool = option(False, "Use deterministic kernels only.", numeric=False, env_common=True)


@dataclass(frozen=True)
class RecordOptions(Checked):
    """Options of commands whose artifacts say where they come from."""

    record_host: bool = option(
        False, "Record the name of this machine in the artifact.", numeric=False, env_common=True
    )


@dataclass(frozen=True)
class NameOptions(Checked):
    """Options that say where one artifact goes."""

    name: str | None = option(None, "Name of the artifact, instead of its method's.", metavar="NAME", numeric=False)
    out: str | None = option(None, "Write to exactly this file.", short="-o", metavar="FILE", numeric=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and self.out is not None:
            raise UsageError("--name and --out exclude each other: give one")
        if self.name is not None:
            check_artifact_name(self.name, "--name")


@dataclass(frozen=True)
class ExtractFeaturesOptions(Checked):
    """Options of extract-features."""

    model: str | None = option(
        None,
        "Network: a built-in name (lenet5, mlp, resnet20, wide-resnet; flatten is none: inputs are the features, CKPT is just the run's name), package.module:factory or file.py:factory. A factory is your code and is run.",
        metavar="MODEL",
    )
    model_arg: list[str] = option([], "Argument of the network, as key=value; repeatable.", metavar="KEY=VALUE")
    data: list[str] = option(
        [],
        "A split whose labels are the network's classes: npz:FILE[:x,y], idx:IMAGES,LABELS, images:DIR, py:module:factory; @N takes the first N rows. Repeatable.",
        metavar="SPLIT=SPEC",
    )
    ood: list[str] = option(
        [],
        "An out-of-distribution split, stored without labels; SPEC as for --data (with --from-npz the name alone). Repeatable.",
        metavar="SPLIT=SPEC",
    )
    hold_out: list[str] = option(
        [],
        "Move N random rows (seeded) of one split into another, as val=test:2000. Validation rows must be rows that the network was not trained on.",
        metavar="NEW=OLD:N",
    )
    from_npz: str | None = option(
        None,
        "Arrays of your own extractor: features_<split>, labels_<split>, head_weight, head_bias. CKPT is then just the run's name.",
        metavar="FILE",
    )
    last_layer: str | None = option(
        None, "Name of the last linear layer, when it is not the last one called.", metavar="NAME"
    )
    mean: str | None = option(None, "Mean of each channel, to normalise inputs in [0, 1].", metavar="M[,M,M]")
    std: str | None = option(None, "Standard deviation of each channel.", metavar="S[,S,S]")
    resize: int | None = option(None, "Resize the shorter side of images to this many pixels.", minimum=1)
    crop: int | None = option(None, "Crop the centre square of this many pixels.", minimum=1)
    dtype: str = option("float32", "Type the features are stored in.", choices=("float32", "float16"))
    batch_size: int = option(256, "Inputs a batch.", minimum=1, numeric=False)
    num_workers: int = option(0, "Processes that decode images.", minimum=0, numeric=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.from_npz is None):
            raise UsageError("give either --model MODEL with --data SPLIT=SPEC, or --from-npz FILE")
        if self.model is not None and ":" not in self.model:
            check_name("networks", self.model, option="--model")
        if self.model is not None and not (self.data or self.ood):
            raise UsageError("--data: give at least one split, as --data train=npz:train.npz")


@dataclass(frozen=True)
class RefineOptions(Checked):
    """Options of refine."""

    base: str = option(
        "laplace",
        "Gaussian to refine: an artifact's name or file, or `prior` (the prior itself).",
        metavar="NAME|FILE|prior",
        numeric=False,
    )
    flow: str = option("radial", "Flow layer.", family="flows")
    length: int | None = option(None, "Number of flow layers; the flow's own choice by default (radial: 5).", minimum=1)
    epochs: int | None = option(
        None, "Passes over the training split, at most; the flow's own choice by default (radial: 20).", minimum=1
    )
    batch_size: int | None = option(
        None,
        "Examples a step, all where it is larger than the split; the flow's own choice by default (radial: 128).",
        minimum=1,
    )
    learning_rate: float | None = option(
        None,
        "First learning rate of Adam, which decays to 0 along a cosine; the flow's own choice by default (radial: 0.001).",
        minimum=1e-12,
    )
    patience: int = option(
        5,
        "End early when the ELBO has stood still for this many rounds (epochs, or 25 steps where an epoch has fewer); 0 never does.",
        minimum=0,
    )
    space: str = option(
        "auto",
        "Where the flow acts: coordinates whitened by the base, or weight space; auto is the flow's own choice.",
        choices=("auto", "whitened", "weight"),
    )
    rank: int | None = option(
        None, "Rank of the flow's update (sylvester, affine --scale low-rank); 16 by default.", minimum=1
    )
    hidden: int | None = option(
        None, "Hidden units of the flow's network (iaf, realnvp, spline); 64 by default.", minimum=1
    )
    scale: str | None = option(None, "Linear part of affine; kron by default.", choices=("kron", "block", "low-rank"))
    num_draws: int | None = option(
        None, "Draws from the flow a step; the flow's own choice by default (radial: 1).", minimum=1
    )
    elbo_draws: int = option(256, "Fresh draws for the ELBO before and after, on the full data.", minimum=2)
    prior_precision: float | None = option(
        None,
        "Prior precision of the target, biases included; the base's prior by default (needed with --base prior and no laplace).",
        minimum=1e-30,
    )
    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that --resume continues from; 0 saves after every round.",
        minimum=0,
        numeric=False,
    )


@dataclass(frozen=True)
class PredictOptions(Checked):
    """Options of predict."""

    posterior: list[str] = option(
        [],
        "Posterior to predict with, by name or file; all of the run by default. Repeatable.",
        metavar="NAME|FILE",
        numeric=False,
    )
    integrator: str | None = option(
        None,
        "How the posterior becomes probabilities; plug-in for map, mc for all others by default.",
        family="integrators",
    )
    keep_samples: bool = option(
        False, "Keep the probabilities of every draw as well (float16, draws x examples x classes).", numeric=False
    )
    samples: int | None = option(None, "Draws of a sampling integrator; 20 by default, all draws for hmc.", minimum=1)
    split: list[str] = option(
        [], "Split to predict; all but train by default. Repeatable.", metavar="SPLIT", numeric=False
    )


@dataclass(frozen=True)
class EvaluateOptions(Checked):
    """Options of evaluate."""

    posterior: list[str] = option([], "Only this posterior's predictions. Repeatable.", metavar="NAME", numeric=False)
    integrator: list[str] = option(
        [], "Only this integrator's predictions. Repeatable.", family="integrators", numeric=False
    )
    split: list[str] = option([], "Only this in-distribution split. Repeatable.", metavar="SPLIT", numeric=False)
    metric: list[str] = option(
        [],
        "Show only this score, and fail (65) where it is undefined for every posterior. Repeatable.",
        choices=("accuracy", "nll", "brier", "ece", "mce", "auroc", "fpr95", "mmd2"),
        numeric=False,
    )
    reference: str = option("hmc", "Sample posterior that MMD^2 is measured to.", metavar="NAME")
    bins: int = option(15, "Equal-width bins of ECE and MCE.", minimum=1)


@dataclass(frozen=True)
class DiagnoseOptions(Checked):
    """Options of diagnose."""

    posterior: list[str] = option(
        [],
        "Posterior to judge, by name or file; all of the run by default. Repeatable.",
        metavar="NAME|FILE",
        numeric=False,
    )
    draws: int | None = option(
        None,
        "Draws for ELBO and Pareto k; by default 512, doubled up to 8192 until the ELBO's standard error is at most 2 nats and 1 %.",
        minimum=2,
    )
    strict: bool = option(False, "Exit 3 unless a posterior is good for its target.", numeric=False)


@dataclass(frozen=True)
class StatusOptions(Checked):
    """Options of status."""

    check: bool = option(False, "Exit 3 unless every artifact is fresh.", numeric=False)


@dataclass(frozen=True)
class ConvertOptions(Checked):
    """Options of convert."""

    trust_pickle: bool = option(
        False, "Unpickle SOURCE although that can run any code in it. Only for files you trust.", numeric=False
    )


@dataclass(frozen=True)
class DemoOptions(Checked):
    """Options of demo."""

    dir: str = option("bnncli-demo", "Folder the demo is made in.", metavar="DIR", numeric=False)
