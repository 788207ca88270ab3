"""The work of train: networks with random weights, their examples on the device, and what they become."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from bnncli.data.labels import FROM_1
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
from bnncli.likelihoods import Likelihood, likelihood_of
from bnncli.models.build import load_network, takes_argument
from bnncli.models.checkpoints import check_finite
from bnncli.models.features import AUTOCAST
from bnncli.models.head import forward, logits_of
from bnncli.numerics.random import stream, stream_seed
from bnncli.options.train import TrainOptions
from bnncli.session.produce import Request, begun_before, resumable_training, say_who_works, stored_in
from bnncli.session.run import Run, arguments_by_name
from bnncli.session.splits import check_outputs
from bnncli.stages.train.apart import groups_of_seeds, of_tensors, tensors_of
from bnncli.stages.train.labelled_inputs import labelled_inputs
from bnncli.stages.train.trained import Trained
from bnncli.system.memory import return_large_blocks
from bnncli.system.user_code import running
from bnncli.system.workers import Team, team
from bnncli.training.loop import Course, num_batches, train
from bnncli.training.shared_out import Seat, by_number, numbered, share_out

if TYPE_CHECKING:
    from torch import Tensor, nn

_PROBED = 2  # examples that show what a network gives


class Training:
    """Networks of some seeds, trained as one batch, for requests the first of which the resume state belongs to.

    Attributes:
        networks: in the order of the seeds.
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
        groups = [range(len(seeds))] if others is None else groups_of_seeds(len(seeds), run.device)
        also = None if others is None else {"groups": ",".join(str(len(group)) for group in groups)}
        self.resumable = resumable_training(
            run, request, resume=options.resume, save_every=options.save_every, also=also
        )
        device = run.device
        examples = {
            name: labelled_inputs(split, device, num_workers=options.num_workers, progress=run.console)
            for name, split in splits.items()
        }
        with torch.random.fork_rng(devices=[]):
            modules = [_network(options, seed) for seed in seeds]
            modules = [module.to(device).to(memory_format=torch.channels_last) for module in modules]  # type: ignore[call-overload]
            first = examples["train"].inputs[:_PROBED]
            num_outputs = _num_outputs(options, modules[0], first)
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
    ) -> list[Trained]:
        """The same of groups of networks, each a batch of its own, shared out among workers."""
        say_who_works(self.run, others, len(groups))
        stored = stored_in(self.resumable, begun_before(state), others, len(groups))

        def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
            found = self._train(
                modules, examples, settings, groups[number], state=seat.state, save=seat.save, progress=seat
            )
            return numbered({place: tensors_of(one) for place, one in enumerate(found)})

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
        return [of_tensors(one) for part in parts for one in by_number(part).values()]

    def _train(
        self,
        modules: list[nn.Module],
        examples: Mapping[str, Examples],
        settings: MapSettings,
        places: range,
        **report: Any,
    ) -> list[Trained]:
        """The networks of these places among all, as one batch; report: as the loop of trainings has it."""
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
        course = Course(options.epochs or 0, num_batches(learner), str(options.schedule))
        users_code = running("the network", but=RuntimeError) if ":" in str(options.model) else nullcontext()
        with users_code:
            train(learner, course, what="train", **report)
        return self._trained(learner, examples)

    def _trained(self, learner: MapLearner, examples: Mapping[str, Examples]) -> list[Trained]:
        """What each network became, its scores those of the state that is meant to be used: the averaged one where it is there."""
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
            found.append(Trained(states[0], states[1], meta))
        return found

    def forget(self) -> None:
        """All networks are published."""
        self.resumable.remove()


def stored_bytes(options: TrainOptions) -> int:
    """What a checkpoint of a built-in network takes."""
    with torch.device("meta"):
        network = load_network(str(options.model), arguments_by_name(options.model_arg), None)
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    return size * (1 if options.ema is None else 2)


def _network(options: TrainOptions, seed: int) -> nn.Module:
    """The network with the random weights of a seed."""
    return_large_blocks()
    torch.manual_seed(stream_seed(seed, "train/initial"))
    network = load_network(str(options.model), arguments_by_name(options.model_arg), None)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise DataError(f"the network {options.model!r} has no parameters to train", code="no_parameters")
    return network


def _num_outputs(options: TrainOptions, module: nn.Module, inputs: Tensor) -> int:
    """Outputs of an example, by inputs (n, ...). Raises DataError where the network cannot take these."""
    try:
        return forward(module.eval(), inputs).reshape(len(inputs), -1).shape[1]
    except DataError as error:
        if error.code == "wrong_inputs" and takes_argument(str(options.model), "inputs"):
            error.hint = f"set the number of inputs: \0model_arg\0 inputs={inputs[0].numel()}"
        raise


def _settings(options: TrainOptions, split: InputSplit, inputs: Tensor) -> MapSettings:
    """How networks learn; black, for augmentation, is what the preprocessing makes of zeros."""
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


def _probe(modules: list[nn.Module], learner: MapLearner) -> None:
    """Pass where the networks take the smallest batch of an epoch, as they do in training.

    Raises:
        UsageError: they cannot be trained as one batch.
        DataError: they raise, such as batch norm with a single example.
    """
    rest = learner.num_examples % int(learner.batch_size or 1) or int(learner.batch_size or 1)
    trial = StackedNetworks(deepcopy(modules), logits_of)
    trial.set_training(True)
    inputs = learner.train.inputs[:rest].expand(len(modules), *learner.train.inputs[:rest].shape)
    try:
        with torch.no_grad(), running("the network", but=RuntimeError):
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


def _check_labels(examples: Examples, likelihood: Likelihood, name: str) -> None:
    """Pass when the labels are classes of the network. Raises DataError otherwise."""
    labels = examples.labels
    if labels.ndim == 1 and int(labels.max()) >= likelihood.num_classes:
        raise DataError(
            f"split {name}: a label is {int(labels.max())}, but the network has classes 0 to "
                f"{likelihood.num_classes - 1}",
            code="bad_labels", hint=FROM_1 if labels.min() == 1 and labels.max() == likelihood.num_classes
            else "set the number of outputs, such as \0model_arg\0 classes=N",
        )  # fmt: skip


def _prior_precision(learner: MapLearner) -> float | None:
    """Of the Gaussian prior whose mode the training looks for; None where its loss is no log posterior."""
    settings = learner.settings
    is_map = settings.optimizer != "adamw" and not settings.label_smoothing and settings.weight_decay
    return settings.weight_decay * learner.num_examples if is_map else None


def _state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict. Raises NumericError where it is not finite."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    try:
        check_finite(state)
    except DataError as error:
        raise NumericError(
            f"training ended with non-finite weights: {error.message}", hint="use a lower \0learning_rate\0"
        ) from None
    return state


def _report(run: Run, epoch: int, history: EpochScores) -> None:
    """A line on an epoch for whoever asked for more."""
    said = [
        ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in history.last(place).items())
        for place in range(len(history.loss[-1]))
    ]
    run.console.debug(f"epoch {epoch}: {'; '.join(said)}")
