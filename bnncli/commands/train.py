"""train: train a network on labelled data and write its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import RECORDED_NETWORK, TRAINED_KIND, write_trained
from bnncli.data.labels import FROM_1, alphabetical_numbering, common_task
from bnncli.data.pixels import Augmentation
from bnncli.data.splits import InputSplit
from bnncli.errors import DataError, NumericError, UsageError
from bnncli.inference.map_training import (
    EpochScores,
    Examples,
    MapLearner,
    MapSettings,
    StackedNetworks,
    Streams,
    evaluate,
)
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood, likelihood_of, name_to_record
from bnncli.models.build import load_network, takes_argument
from bnncli.models.checkpoints import check_finite
from bnncli.models.features import AUTOCAST
from bnncli.models.head import forward, logits_of
from bnncli.names import count_noun, percent
from bnncli.numerics.random import stream, stream_seed
from bnncli.options import shared
from bnncli.options.command import (
    Argument,
    Command,
    CommonOptions,
    ComputeOptions,
    LockOptions,
    RecordOptions,
    WriteOptions,
    format_command_line,
)
from bnncli.options.declaration import CheckedOptions, option
from bnncli.progress import SILENT, Progress
from bnncli.registry import check_name, has_name, names, own_names
from bnncli.session import revisions as _revisions
from bnncli.session.produce import (
    ComputationOutput,
    Request,
    Work,
    prepare_resumable_training,
    produce_together,
    report_idle_workers,
    select_own_states,
    take_begun_states,
)
from bnncli.session.run import Result, Run, arguments_by_name
from bnncli.session.splits import check_network_file, check_outputs, open_splits, user_sources
from bnncli.session.states import artifact_states
from bnncli.system import memory
from bnncli.system.user_code import running_user_code
from bnncli.system.workers import Team, is_leader, shares, team
from bnncli.training.loop import LearningRateSchedule, num_batches, train
from bnncli.training.shared_out import Seat, number_tensors, share_out, split_by_number

if TYPE_CHECKING:
    from torch import Tensor, nn


OPTIMIZERS = ("adam", "adamw", "sgd", "nesterov")
SCHEDULES = ("cosine", "step", "constant")
AUGMENTATIONS = ("none", "flip", "crop", "crop+flip")

# Defaults of training: the settings of Kristiadi, Eschenhagen and Hennig (2022) for Fashion-MNIST.
_DEFAULTS: dict[str, Any] = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "epochs": 100,
    "batch_size": 128,
    "schedule": "cosine",
    "augment": "none",
}
_CIFAR = {"optimizer": "nesterov", "learning_rate": 0.1, "augment": "crop+flip"}
RECIPES: dict[str, dict[str, Any]] = {
    # The same paper's, and its inputs in [0, 1] as they are.
    "lenet-fmnist": {"model": "lenet5"},
    "mlp-fmnist": {"model": "mlp", "model_arg": ["inputs=784", "hidden=50"]},
    "wrn-16-4-cifar": {"model": "wide-resnet", "model_arg": ["depth=16", "width=4"], **_CIFAR},
    # He et al. (2016, arXiv:1512.03385, 4.2), as akamaster's pytorch_resnet_cifar10 trains it to 91.7 %: the rate falls to a
    # tenth after half of 200 epochs and to a hundredth after three quarters; its inputs are normalised by ImageNet's moments.
    "resnet20-cifar": {
        "model": "resnet20",
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "weight_decay": 1e-4,
        "epochs": 200,
        "schedule": "step",
        "augment": "crop+flip",
        "mean": "0.485,0.456,0.406",
        "std": "0.229,0.224,0.225",
    },
}


def _model_help() -> str:
    built_in = ", ".join(name for name in names("networks") if name != "flatten")
    return f"Network: {built_in}; or your code, package.module:factory or file.py:factory."


def _recipe_help() -> str:
    return "Published settings to start from; other options override them."


@dataclass(frozen=True)
class TrainOptions(CheckedOptions):
    """Options of train."""

    recipe: str | None = option(None, _recipe_help, choices=tuple(RECIPES), group="Network")
    model: str | None = option(None, _model_help, metavar="MODEL", group="Network")
    model_arg: list[str] = shared.model_arg()
    data: list[str] = shared.data()
    hold_out: list[str] = shared.hold_out()
    task: str | None = shared.task()
    mean: str | None = shared.mean()
    std: str | None = shared.std()
    resize: int | None = shared.resize()
    crop: int | None = shared.crop()
    optimizer: str | None = option(
        None, "Optimizer. Default: adam; nesterov is sgd with Nesterov momentum.", choices=OPTIMIZERS, group="Training"
    )
    learning_rate: float | None = option(
        None, "Initial learning rate. Default: 0.001.", minimum=1e-12, maximum=1e6, group="Training"
    )
    momentum: float | None = option(
        None, "Momentum of sgd and nesterov. Default: 0.9.", minimum=0, maximum=0.9999, group="Training", is_rare=True
    )
    weight_decay: float | None = option(
        None,
        "L2 weight of all parameters, which corresponds to a Gaussian prior with precision N times this. "
        "Default: 0.0005.",
        minimum=0,
        maximum=1e6,
        group="Training",
    )
    epochs: int | None = option(None, "Passes over the training split. Default: 100.", minimum=1, group="Training")
    batch_size: int | None = option(None, "Examples per step. Default: 128.", minimum=1, group="Training")
    schedule: str | None = option(
        None,
        "Learning rate schedule; step divides by 10 after 1/2 and after 3/4 of the steps. Default: cosine.",
        choices=SCHEDULES,
        group="Training",
    )
    augment: str | None = option(
        None,
        "Random augmentation of images: crop (shift by up to \0padding\0 pixels), flip (left to right).",
        choices=AUGMENTATIONS,
        group="Images",
    )
    padding: int = option(4, "Largest shift of crop, in pixels.", minimum=1, group="Images", is_rare=True)
    label_smoothing: float = option(
        0.0, "Share of each label to spread over all classes.", minimum=0, maximum=0.999, group="Training", is_rare=True
    )
    ema: float | None = option(
        None,
        "Also keep an average of the weights with this decay per step, such as 0.999. extract-features "
        "\0state\0 ema uses that average.",
        minimum=0,
        maximum=0.999999,
        group="Training",
        is_rare=True,
    )
    autocast: str | None = option(
        None, "Run the network in lower precision (torch.autocast).", choices=("bf16",), group="Training", is_rare=True
    )
    seeds: int | None = option(
        None,
        "Train this many small networks as one batch, with \0seed\0 and the seeds after it. Writes one "
        "CKPT-SEED.safetensors per network.",
        minimum=2,
        maximum=1000,
        group="Training",
        is_rare=True,
    )
    num_workers: int = shared.num_workers()
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Training"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every epoch.",
        minimum=0,
        numeric=False,
        group="Training",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and ":" not in self.model:
            check_name("networks", self.model, option="\0model\0", also=["package.module:factory", "file.py:factory"])
        if self.model is not None and has_name("models", self.model.partition(":")[0]):
            raise UsageError(
                f"\0model\0: expected a built-in network, package.module:factory or file.py:factory; {self.model!r} has weights already"
            )
        if self.model == "flatten":
            raise UsageError("\0model\0 flatten has nothing to train: name a network")

    def resolved(self) -> TrainOptions:
        """Return the options with the recipe's settings and the defaults filled in.

        Raises:
            UsageError: no network, no training split, or an option that has no effect with the others.
        """
        recipe = {**_DEFAULTS, **RECIPES.get(self.recipe or "", {})}
        if self.model is not None and self.model != recipe.get("model"):
            recipe.pop("model_arg", None)  # they are another network's
        own = {argument.partition("=")[0] for argument in self.model_arg}
        preset = [argument for argument in recipe.pop("model_arg", []) if argument.partition("=")[0] not in own]
        if self.optimizer not in (None, recipe["optimizer"]) and self.learning_rate is None:
            raise UsageError(
                f"\0optimizer\0 {self.optimizer} needs \0learning_rate\0: the current one, "
                f"{recipe['learning_rate']}, is for {recipe['optimizer']}"
            )
        open_ones = {name: value for name, value in recipe.items() if getattr(self, name) is None}
        found = replace(self, model_arg=[*preset, *self.model_arg], **open_ones)
        if found.model is None:
            raise UsageError("\0model\0: name a network, or a \0recipe\0 that has one")
        if not any(text.startswith("train=") for text in self.data):
            raise UsageError("\0data\0: give the training split, such as \0data\0 train=npz:train.npz")
        if self.momentum is not None and found.optimizer not in ("sgd", "nesterov"):
            raise UsageError(f"\0momentum\0 is for \0optimizer\0 sgd and nesterov; the optimizer is {found.optimizer}")
        return found

    def settings(self) -> dict[str, Any]:
        """Return the resolved options that change numbers, which a checkpoint records."""
        found = self.params()
        del found["recipe"], found["data"]  # another way to say the others; what lies there tells its content
        found["model_arg"] = sorted(found["model_arg"])
        if self.optimizer not in ("sgd", "nesterov"):
            del found["momentum"]
        if "crop" not in (self.augment or ""):
            del found["padding"]
        return found


SUFFIX = ".safetensors"
HOLD_OUT_SEED = 0  # as in extract-features by default: every seed leaves out the same rows

COMMAND = Command(
    "Train a network on labelled data and write its checkpoint.",
    "Writes a safetensors state dict that records how it was trained. --hold-out picks the same examples as "
    "extract-features with seed 0, regardless of --seed.",
    (TrainOptions, ComputeOptions, RecordOptions, WriteOptions, LockOptions, CommonOptions),
    (
        "bnncli train lenet.safetensors --recipe lenet-fmnist --data train=npz:train.npz --data test=npz:test.npz --hold-out val=test:2000",
        "bnncli train net.safetensors --model net.py:make --data train=images:train --resize 36 --crop 32 --epochs 30",
        "bnncli train mlp.safetensors --recipe mlp-fmnist --data train=npz:train.npz --seeds 5",
    ),
    (Argument("ckpt", "The checkpoint to write. Its name must end in .safetensors.", writes=True),),
    section="Start",
    place=30,
)


def execute(run: Run, options: TrainOptions) -> Result:
    """Train one network, or several seeds of it, and publish a checkpoint of each."""
    options = options.resolved()
    targets = _targets(run, options)
    splits = {
        split.name: split
        for split in open_splits(
            options,
            None,
            seed=stream_seed(HOLD_OUT_SEED, "extract-features/hold-out"),
            memory=lambda name: None,
        )
    }
    for split in splits.values():
        if (order := alphabetical_numbering(split)) is not None:
            run.console.info(order)
        if not split.is_labeled:
            raise UsageError(f"\0data\0 {split.name}: training and its scores need labels, but {split.spec} has none")
    likelihood = common_task({split.spec: split.shown_labels for split in splits.values()}, options.task)
    requests = [
        _request(run, options, target, seed, list(splits.values()), likelihood) for seed, target in targets.items()
    ]
    made: list[Training] = []

    def training() -> Training:
        """Train all networks when the first is requested."""

        if not made:
            made.append(Training(run, options, splits, likelihood, requests[0], seeds=list(targets)))
        return made[0]

    def compute(place: int) -> ComputationOutput:
        trained = training().networks[place]

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            with training().resumable.hint():
                return write_trained(
                    requests[place].target,
                    trained.state,
                    averaged=trained.averaged,
                    meta=trained.meta,
                    provenance=provenance,
                    may_replace=may_replace,
                )

        return ComputationOutput(publish)

    works = [Work(request, partial(compute, place)) for place, request in enumerate(requests)]
    results = produce_together(run, works, also=lambda: [], before=lambda files: None)
    for one in made:
        one.forget()
    return _combine_results(run, options, requests, results)


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network: its state dict, that of its running average if any, and its metrics."""

    state: dict[str, Tensor]
    averaged: dict[str, Tensor] | None
    meta: dict[str, Any]


_PROBED = 2  # examples to find a network's number of outputs


class Training:
    """Networks of several seeds, trained as one batch. The resume state belongs to the first seed's request.

    Attributes:
        networks: the networks, in the order of the seeds.
    """

    def __init__(
        self,
        run: Run,
        options: TrainOptions,
        splits: Mapping[str, InputSplit],
        likelihood_name: str | None,
        request: Request,
        *,
        seeds: list[int],
    ) -> None:
        self.run, self.options, self.seeds = run, options, seeds
        others = team()
        groups = [range(len(seeds))] if others is None else group_seeds(len(seeds), run.device)
        also = None if others is None else {"groups": ",".join(str(len(group)) for group in groups)}
        self.resumable = prepare_resumable_training(
            run, request, resume=options.resume, save_every=options.save_every, also=also
        )
        device = run.device
        examples = {
            name: read_inputs(split, device, num_workers=options.num_workers, progress=run.console)
            for name, split in splits.items()
        }
        with torch.random.fork_rng(devices=[]):
            modules = [_network(options, seed) for seed in seeds]
            modules = [module.to(device).to(memory_format=torch.channels_last) for module in modules]  # type: ignore[call-overload]
            first = examples["train"].inputs[:_PROBED]
            num_outputs = _count_outputs(options, modules[0], first)
            check_outputs(options.task, likelihood_name, num_outputs)
            self.likelihood = likelihood_of(num_outputs, likelihood_name)
            for name, one in examples.items():
                _check_labels(one, self.likelihood, name)
            settings = _settings(options, splits["train"], examples["train"].inputs)
            with self.resumable.hint():
                state = self.resumable.restore()
                if others is None:
                    self.networks = self._train(
                        modules,
                        examples,
                        settings,
                        groups[0],
                        state=state,
                        save=self.resumable.save,
                        progress=run.console,
                    )
                else:
                    self.networks = self._train_apart(others, modules, examples, settings, groups, state)

    def _train_apart(
        self,
        others: Team,
        modules: list[nn.Module],
        examples: Mapping[str, Examples],
        settings: MapSettings,
        groups: list[range],
        state: dict[str, Tensor] | None,
    ) -> list[TrainedNetwork]:
        """Train groups of networks, each as its own batch, shared among workers."""
        report_idle_workers(self.run, others, len(groups))
        stored = select_own_states(self.resumable, take_begun_states(state), others, len(groups))

        def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
            found = self._train(
                modules, examples, settings, groups[number], state=seat.state, save=seat.save, progress=seat
            )
            return number_tensors({place: pack_tensors(one) for place, one in enumerate(found)})

        num_examples = len(examples["train"].inputs)
        num_batches = -(-num_examples // min(settings.batch_size, num_examples))
        parts = share_out(
            others,
            [f"seed {', '.join(str(self.seeds[place]) for place in group)}" for group in groups],
            work,
            what="train",
            num_steps=(self.options.epochs or 0) * num_batches,
            progress=self.run.console,
            stored=stored,
        )
        return [unpack_tensors(one) for part in parts for one in split_by_number(part).values()]

    def _train(
        self,
        modules: list[nn.Module],
        examples: Mapping[str, Examples],
        settings: MapSettings,
        places: range,
        **report: Any,
    ) -> list[TrainedNetwork]:
        """Train the networks at these indices as one batch, with `report` as in the training loop."""
        run, options, seeds = self.run, self.options, [self.seeds[place] for place in places]
        own = [modules[place] for place in places]
        learner = MapLearner(
            StackedNetworks(own, logits_of),
            examples["train"],
            likelihood=self.likelihood,
            settings=settings,
            streams=[Streams(stream(seed, "train/order"), stream(seed, "train/augmentation")) for seed in seeds],
            generator=stream(seeds[0], "train/network"),
            val=examples.get("val"),
            is_capturable=":" not in str(options.model),
            report=partial(_report, run),
        )
        _probe(own, learner)
        course = LearningRateSchedule(options.epochs or 0, num_batches(learner), str(options.schedule))
        users_code = running_user_code("the network", but=RuntimeError) if ":" in str(options.model) else nullcontext()
        with users_code:
            train(learner, course, what="train", **report)
        return self._trained(learner, examples)

    def _trained(self, learner: MapLearner, examples: Mapping[str, Examples]) -> list[TrainedNetwork]:
        """Return each trained network, scored with its averaged state if there is one."""
        raw = learner.networks.separate()
        averaged = learner.averaged() if learner.averages else None
        found = []
        for place, module in enumerate(raw):
            used = module if averaged is None else averaged[place]
            scores = {name: evaluate(used, one, self.likelihood, logits_of) for name, one in examples.items()}
            metrics = {
                "loss": learner.history.last(place)["loss"],
                "splits": {name: {"nll": nll, "accuracy": accuracy} for name, (nll, accuracy) in scores.items()},
                "is_averaged": averaged is not None,
                "prior_precision": _prior_precision(learner),
            }
            states = [_state(module), None if averaged is None else _state(averaged[place])]
            meta = {
                "method": "train",
                "gradient_passes": learner.num_epochs,
                "num_examples": learner.num_examples,
                "metrics": metrics,
            }
            assert states[0] is not None
            found.append(TrainedNetwork(states[0], states[1], meta))
        return found

    def forget(self) -> None:
        """Remove the resume state once all networks are published."""
        self.resumable.remove()


def _targets(run: Run, options: TrainOptions) -> dict[int, Path]:
    """Return the checkpoint file of each seed."""
    given, first = Path(run.arguments["ckpt"]), run.compute.seed
    if given.suffix != SUFFIX:
        raise UsageError(f"CKPT: expected a name that ends in {SUFFIX}; got {str(given)!r}")
    if options.seeds is None:
        return {first: given}
    return {seed: given.with_name(f"{given.stem}-{seed}{SUFFIX}") for seed in range(first, first + options.seeds)}


def _request(
    run: Run, options: TrainOptions, target: Path, seed: int, splits: list[InputSplit], likelihood: str | None
) -> Request:
    sources = {source.role: source for split in splits for source in user_sources(options, split, None)}
    names = sorted(split.name for split in splits)
    params = {**options.settings(), **name_to_record(likelihood), "splits": names, "seed": seed}

    def estimated_bytes() -> int:
        if ":" in str(options.model):  # code is not run to tell
            return 1 << 20

        return compute_stored_bytes(options)

    return Request(
        target,
        TRAINED_KIND,
        "checkpoint",
        params,
        _revisions.TRAIN,
        list(sources.values()),
        None,
        estimated_bytes,
        begin=partial(check_network_file, options),
    )


def compute_stored_bytes(options: TrainOptions) -> int:
    """Return the size of a built-in network's checkpoint, in bytes."""
    with torch.device("meta"):
        network = load_network(str(options.model), arguments_by_name(options.model_arg), None)
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    return size * (1 if options.ema is None else 2)


# Networks of a group, at most. On a CPU one by one costs next to nothing, but for the smallest; a GPU wants large kernels.
GROUP_SEEDS = {"cpu": 1, "cuda": 8}


def group_seeds(num_seeds: int, device: torch.device) -> list[range]:
    """Split seeds into groups of nearly equal size and return the indices of each. Depends on the number of seeds, not of workers."""
    return shares(num_seeds, -(-num_seeds // GROUP_SEEDS.get(device.type, 1)))


_READ = 1024  # examples at once


def read_inputs(
    split: InputSplit, device: torch.device, *, num_workers: int = 0, progress: Progress = SILENT
) -> Examples:
    """Return the inputs (N, ...) and labels of a split.

    Raises:
        DataError: an example is not a single tensor, has no label, or has NaN or infinite values.
        DeviceError: the inputs do not fit in the device's memory.
    """
    task = progress.task(f"read {split.name}", len(split))
    inputs = labels = torch.empty(0)
    start = 0
    for batch in split.batches(_READ, num_workers=num_workers):
        if isinstance(batch.inputs, dict):
            raise DataError(
                f"split {split.name} has several inputs per example ({', '.join(batch.inputs)}); expected one "
                    "tensor per example",
                code="wrong_inputs", hint="train takes images, rows of numbers, and sounds that all have the same length",
            )  # fmt: skip
        if batch.labels is None:
            raise DataError(f"split {split.name}: {split.spec} has no labels", code="no_labels")
        if start == 0:
            one = batch.inputs[0]
            memory.require(
                len(split) * one.nbytes, device, what=f"split {split.name}", hint="use fewer examples: SPEC@N"
            )
            inputs = torch.empty((len(split), *one.shape), dtype=one.dtype, device=device)
            labels = torch.empty((len(split), *batch.labels.shape[1:]), dtype=batch.labels.dtype, device=device)
        _check_finite(split, start, batch.inputs)
        end = start + len(batch.inputs)
        inputs[start:end], labels[start:end] = batch.inputs.to(device), batch.labels.to(device)
        task.advance(end - start)
        start = end
    return Examples(inputs, labels)


def _check_finite(split: InputSplit, start: int, inputs: torch.Tensor) -> None:
    """Check inputs (n, ...) of the examples from `start` on, while they are on the CPU.

    Raises:
        DataError: a value is NaN or infinite. The message names the first such row.
    """
    if not inputs.is_floating_point() or bool(
        torch.isfinite(inputs.sum())
    ):  # NaN or infinity makes the sum NaN or infinite
        return
    bad = (~torch.isfinite(inputs.flatten(1))).any(dim=1).nonzero()
    if len(bad):
        row = int(split.rows[start + int(bad[0])])
        raise DataError(
            f"split {split.name}: expected finite inputs; row {row} of {split.spec} has NaN or infinite values",
            code="not_finite", hint="fix these values, or drop the rows that have them",
        )  # fmt: skip


def _network(options: TrainOptions, seed: int) -> nn.Module:
    """Build the network with the random weights of a seed."""
    torch.manual_seed(stream_seed(seed, "train/initial"))
    network = load_network(str(options.model), arguments_by_name(options.model_arg), None)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise DataError(f"the network {options.model!r} has no parameters to train", code="no_parameters")
    return network


def _count_outputs(options: TrainOptions, module: nn.Module, inputs: Tensor) -> int:
    """Return the number of outputs for inputs (n, ...). Raises DataError where the network cannot take them."""
    try:
        return forward(module.eval(), inputs).reshape(len(inputs), -1).shape[1]
    except DataError as error:
        if error.code == "wrong_inputs" and takes_argument(str(options.model), "inputs"):
            error.hint = f"set the number of inputs: \0model_arg\0 inputs={inputs[0].numel()}"
        raise


def _check_labels(examples: Examples, likelihood: Likelihood, name: str) -> None:
    """Raise DataError unless the labels are classes of the network."""
    labels = examples.labels
    if labels.ndim == 1 and int(labels.max()) >= likelihood.num_classes:
        raise DataError(
            f"split {name}: a label is {int(labels.max())}, but the network has classes 0 to "
                f"{likelihood.num_classes - 1}",
            code="bad_labels", hint=FROM_1 if labels.min() == 1 and labels.max() == likelihood.num_classes
            else "set the number of outputs, such as \0model_arg\0 classes=N",
        )  # fmt: skip


def _settings(options: TrainOptions, split: InputSplit, inputs: Tensor) -> MapSettings:
    """Return the training settings. Black, for augmentation, is a zero pixel after preprocessing."""
    augmentation = None
    if options.augment != "none":
        if inputs.ndim != 4:
            raise UsageError(f"\0augment\0 needs images (N, C, H, W); got inputs of shape {tuple(inputs.shape)}")
        black = split.preprocess.apply(torch.zeros(1, inputs.shape[1], 1, 1), is_sized=True).flatten()
        augment = str(options.augment)
        padding = options.padding if "crop" in augment else 0
        if padding >= min(inputs.shape[-2:]):
            size = " x ".join(map(str, inputs.shape[-2:]))
            raise UsageError(f"\0padding\0: expected fewer pixels than the images have ({size}); got {padding}")
        augmentation = Augmentation(padding, "flip" in augment, black.to(inputs.device))
    assert options.learning_rate is not None
    return MapSettings(
        str(options.optimizer),
        options.learning_rate,
        options.momentum or 0.0,
        options.weight_decay or 0.0,
        options.batch_size or 1,
        options.label_smoothing,
        options.ema,
        augmentation,
        None if options.autocast is None else getattr(torch, AUTOCAST[options.autocast]),
    )


def pack_tensors(trained: TrainedNetwork) -> dict[str, Tensor]:
    """Return a trained network as tensors."""
    said = torch.frombuffer(bytearray(json.dumps(trained.meta).encode()), dtype=torch.uint8)
    found = {f"state/{name}": tensor for name, tensor in trained.state.items()}
    found |= {f"averaged/{name}": tensor for name, tensor in (trained.averaged or {}).items()}
    return {"meta": said, **found}


def unpack_tensors(tensors: dict[str, Tensor]) -> TrainedNetwork:
    """Return the trained network of tensors from tensors_of."""
    parts: dict[str, dict[str, Tensor]] = {"state": {}, "averaged": {}}
    for key, tensor in tensors.items():
        kind, slash, name = key.partition("/")
        if slash:
            parts[kind][name] = tensor
    return TrainedNetwork(parts["state"], parts["averaged"] or None, json.loads(bytes(tensors["meta"].tolist())))


def _report(run: Run, epoch: int, history: EpochScores) -> None:
    """Print one line per epoch with -v."""
    said = [
        ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in history.last(place).items())
        for place in range(len(history.loss[-1]))
    ]
    run.console.debug(f"epoch {epoch}: {'; '.join(said)}")


def _probe(modules: list[nn.Module], learner: MapLearner) -> None:
    """Run the networks on the smallest batch of an epoch, as in training.

    Raises:
        UsageError: the networks cannot be trained as one batch.
        DataError: they fail, such as batch norm on a single example.
    """
    rest = learner.num_examples % int(learner.batch_size or 1) or int(learner.batch_size or 1)
    trial = StackedNetworks(deepcopy(modules), logits_of)
    trial.set_training(True)
    inputs = learner.train.inputs[:rest].expand(len(modules), *learner.train.inputs[:rest].shape)
    try:
        with torch.no_grad(), running_user_code("the network", but=RuntimeError):
            trial(inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0][:200]
        if len(modules) > 1:
            raise UsageError(
                f"\0seeds\0: cannot train several copies of this network at once ({first_line})",
                hint="train each seed separately: \0seed\0 1, \0seed\0 2, ...",
            ) from error
        raise DataError(f"the network cannot be trained: {first_line}", code="wrong_inputs") from error


def _prior_precision(learner: MapLearner) -> float | None:
    """Return the precision of the Gaussian prior that weight decay implies; None where the loss is not a log posterior."""
    settings = learner.settings
    is_map = settings.optimizer != "adamw" and not settings.label_smoothing and settings.weight_decay
    return settings.weight_decay * learner.num_examples if is_map else None


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict. Raises NumericError where it is not finite."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    try:
        check_finite(state)
    except DataError as error:
        raise NumericError(
            f"training ended with non-finite weights: {error.message}", hint="use a lower \0learning_rate\0"
        ) from None
    return state


def _combine_results(run: Run, options: TrainOptions, requests: list[Request], results: list[Result]) -> Result:
    """Return all results as one, with the metrics of each checkpoint."""
    total = Result()
    for result in results:
        total.add(result)
    if run.write.dry_run or not is_leader():  # which alone sees the files take their names
        return total
    metas = [read_header(request.target).meta for request in requests]
    networks = [
        {"path": str(request.target), "gradient_passes": meta["gradient_passes"], **meta["metrics"]}
        for request, meta in zip(requests, metas, strict=True)
    ]
    total.extra = {"networks": networks}
    total.metrics = metas[0]["metrics"] if len(metas) == 1 else {}
    for request, meta in zip(requests, metas, strict=True):
        total.summary += format_summary(request.target, meta)
    features = run.folder.features("train")
    if len(requests) > 1 or not features.is_file() or artifact_states(run, [features])[0].state != "fresh":
        total.summary.append(f"next: {next_command(options, requests[0].target)}")
    return total


def format_summary(path: Path, meta: Mapping[str, Any]) -> list[str]:
    """Return a line on the training and one on the other splits."""
    metrics = meta["metrics"]
    passes = meta["gradient_passes"]
    averaged = " (running average of the weights)" if metrics["is_averaged"] else ""
    train = metrics["splits"]["train"]
    others = {name: scores for name, scores in metrics["splits"].items() if name != "train"}
    lines = [
        f"{path.name}: {count_noun(passes, 'epoch')}, train NLL {train['nll']:.4f}, accuracy {percent(train['accuracy'], '.2f')}{averaged}"
    ]
    lines += [
        f"  {name}: NLL {scores['nll']:.4f}, accuracy {percent(scores['accuracy'], '.2f')}"
        for name, scores in others.items()
    ]
    if metrics["prior_precision"] is not None:
        lines.append(f"  its weight decay equals a Gaussian prior with precision {metrics['prior_precision']:g}")
    return lines


def next_command(options: TrainOptions, path: Path) -> str:
    """Return the next command for the checkpoint. It names only what the checkpoint does not record, and code to run."""
    again: dict[str, Any] = {"data": options.data, "hold_out": options.hold_out, "task": options.task}
    if options.model not in own_names("networks"):  # whoever names the network says all that goes with it
        again = {name: getattr(options, name) for name in RECORDED_NETWORK} | again
    if options.ema is not None:
        again["state"] = "ema"
    return format_command_line("extract-features", str(path), **again)
