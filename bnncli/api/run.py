"""An opened run: its artifacts, and predictions for arrays."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.api.commands import CommandMethod
from bnncli.api.predictions import ClassProbabilities, OpenedPosterior, check_request, choose_predictor, predict
from bnncli.api.session import (
    Items,
    Session,
    check_finite,
    check_text,
    convert_errors_to_python,
    convert_feature_dtype,
    convert_to_items,
    convert_to_tensor,
    describe_inputs,
    guard_user_network,
    is_features,
    is_of_network,
    open_session,
    refuse_exits,
)
from bnncli.artifacts.files import read_header
from bnncli.commands.extract_features import ExtractFeaturesOptions
from bnncli.data.arrays import ArrayDataset
from bnncli.data.splits import InputSplit
from bnncli.errors import BnnError, DataError, UsageError
from bnncli.evaluation.detectors import DEFAULT_SCORE, FEWEST_ROWS
from bnncli.models import is_kind
from bnncli.session.inputs import load_split, posterior_classes, posterior_source
from bnncli.session.network import RecordedNetwork
from bnncli.session.network_fit import reference_of
from bnncli.session.predictions import find_named
from bnncli.session.predictor import IntegratorChoice, Predictor, TrainData, warn_of_draws, warn_of_few_draws
from bnncli.session.recommendation import metrics_of, open_recommendation
from bnncli.system.devices import keep_random_state

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from PIL.Image import Image
    from torch import Tensor, nn

    from bnncli.api.create import ModuleNetwork
    from bnncli.api.predictions import LoadedPredictor
    from bnncli.session.run import Run


BATCH_SIZE = ExtractFeaturesOptions.batch_size  # the command's default, because sums depend on it


class InputNetwork(RecordedNetwork):
    """The network of a run's features, for the caller's inputs."""

    def features(self, inputs: Tensor | Items) -> Tensor:
        """Return features (N, D) of inputs (N, ...), or of N texts or images, on the CPU, in the run's type.

        Raises:
            DataError, UsageError: the network cannot take the inputs, or features are not finite.
        """
        split = self.split_of(inputs)
        try:
            with keep_random_state(), refuse_exits(), self.visible():
                head = self.network.head(split)
                self.check_head(head)
                return self.network.features(split, head, batch_size=BATCH_SIZE, dtype=self.dtype).features
        except DataError as error:
            if error.code != "wrong_inputs":
                raise
            expected = f"features, or inputs of the network {self.network.spec!r}"
            message = f"x: expected {expected}; got {describe_inputs(inputs)}: {error.message}"
            raise DataError(message, code="wrong_inputs") from error

    def split_of(self, inputs: Tensor | Items) -> InputSplit:
        """Return inputs (N, ...), or N texts or images, as a split.

        Raises:
            DataError: the network cannot take them.
        """
        if isinstance(inputs, Items):
            dataset: ArrayDataset | Items = inputs
            self._check_takes(inputs)
        else:
            check_finite(inputs)
            dataset = ArrayDataset(inputs, None)
        return InputSplit("x", dataset, np.arange(len(inputs)), self.preprocess, is_labeled=False)

    def _check_takes(self, inputs: Items) -> None:
        """Check that the model has its own preprocessing for such items.

        Raises:
            DataError: it does not.
        """
        transform = self.preprocess.transform
        if transform is None or transform.takes != inputs.items:
            takes = "arrays" if transform is None else transform.takes
            message = (
                f"x: expected features, or {takes} for the network {self.network.spec!r}; got {describe_inputs(inputs)}"
            )
            raise DataError(message, code="wrong_inputs")


@dataclass(frozen=True, eq=False)
class SplitArrays:
    """A split of a run, as `extract-features` stored it.

    Attributes:
        features: (N, D) float32 or float16, memory-mapped.
        labels: (N,) int64; (N, C) uint8 if an example has several labels; None for an unlabelled split.
        classes: names of the C classes.
        is_ood: whether the split is out of distribution.
    """

    name: str
    features: NDArray[np.floating[Any]]
    labels: NDArray[np.int64] | NDArray[np.uint8] | None
    classes: tuple[str, ...]
    is_ood: bool

    def __repr__(self) -> str:
        return f"<split {self.name!r}: {self.features.shape[0]} examples of {self.features.shape[1]} features>"


class OpenedRun:
    """The artifacts of a checkpoint. Each call reads and checks the files it needs, as a command does.

    The methods named like commands run these: `run.fit_laplace(structure="kron")` is `bnncli fit-laplace CKPT --structure
    kron`, with the seed and device of the run.

    Attributes:
        session: state shared by all calls on the run.
        module_network: the module of a run made by `from_torch`, for inputs; None for others.
    """

    def __init__(self, session: Session, model: str | None) -> None:
        self.session, self._model = session, model
        self._predictors: dict[Path, tuple[Predictor, str | None]] = {}  # with the digest of train
        self._scores: tuple[list[str | None], TrainData] | None = None  # with the digests of train and val
        self._network: InputNetwork | None = None
        self.module_network: ModuleNetwork | None = None
        self._folder, self._checkpoint_state = session.folder, session.checkpoint_state

    def __repr__(self) -> str:
        return f"<run {str(self.folder)!r}: splits {list(self.splits)}, posteriors {list(self.posteriors)}>"

    @property
    def folder(self) -> Path:
        """Path of the run folder."""
        return self.session.folder.root

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits with features, train first."""
        return tuple(self.session.folder.splits())

    @property
    def posteriors(self) -> tuple[str, ...]:
        """Names of the posteriors: map, temperature, calibration, laplace, refine, hmc, then the others."""
        return tuple(path.stem for path in self.session.folder.posteriors())

    def split(self, name: str, *, allow_stale: bool = False) -> SplitArrays:
        """Return the features and labels of a split.

        Raises:
            MissingInput: there is no such split.
            DataError: it is damaged, stale, or belongs to another checkpoint.
        """
        with self.session.computing(allow_stale=allow_stale) as run:
            content = load_split(run, check_text("name", name)).content
            return SplitArrays(name, content.features, content.labels, tuple(content.classes), content.is_ood)

    def posterior(self, name: str, *, allow_stale: bool = False) -> OpenedPosterior:
        """Return a posterior of the run, by name or file.

        Raises:
            MissingInput: there is no such posterior.
            DataError: it is damaged, stale, or belongs to another checkpoint.
            DeviceError: it does not fit into memory.
        """
        with self.session.computing(allow_stale=allow_stale) as run:
            predictor = self._predictor(run, name)
            if predictor.header.kind == "samples":
                predictor.require_memory(0, option=None)
            with guard_user_network(predictor):
                _ = predictor.posterior  # read now, because the file may change later
            again = partial(self.posterior, str(predictor.path.absolute()), allow_stale=allow_stale)
            return OpenedPosterior(self.session, predictor, again)

    def metrics(
        self, *, posterior: str | None = None, split: str | None = None, allow_stale: bool = False
    ) -> list[dict[str, Any]]:
        """Return the scores that `evaluate` stored, as in its --json: a dict for each posterior, integrator and split.

        Stale scores are skipped with a warning; if you name their posterior, they are an error.

        Args:
            posterior: name of a posterior, or of its predictions (laplace.mc); all by default.
            split: name of a split; all by default.

        Raises:
            MissingInput: there are no such scores.
            DataError: they are stale or damaged.
        """
        with self.session.asking(allow_stale=allow_stale) as run:
            posterior = None if posterior is None else check_text("posterior", posterior)
            split = None if split is None else check_text("split", split)
            return metrics_of(run, posterior=posterior, split=split)

    def features(
        self, inputs: str | ArrayLike | Tensor | Image | Sequence[Image], *, allow_stale: bool = False
    ) -> NDArray[np.floating[Any]]:
        """Return features (N, D) of inputs (N, ...), with the network and preprocessing of the run.

        If the model has its own preprocessing, inputs are a list of N texts, PIL images, or audio clips: dicts of `array` (T,)
        and `sampling_rate` in Hz; or texts as lists of N words in all.

        Raises:
            DataError: the run has no network, it cannot take the inputs, or its code has changed.
            Untrusted: the network is your own code, and `open` was called without `model`.
        """
        with self.session.computing(allow_stale=allow_stale) as run:
            given = convert_to_items(inputs)
            network = self._input_network(run)
            found: NDArray[np.floating[Any]] = network.features(
                convert_to_tensor(inputs, lambda: self._input_shape(run)) if given is None else given
            ).numpy()
            return found

    def predict(
        self,
        x: str | ArrayLike | Tensor | Image | Sequence[Image],
        *,
        posterior: str | None = None,
        integrator: str | None = None,
        samples: int | None = None,
        allow_stale: bool = False,
        **settings: str | float | bool | None,
    ) -> ClassProbabilities:
        """Return class probabilities of N examples; for a split's features, the ones that `bnncli predict` stores.

        Args:
            x: features (N, D), or inputs. One example alone, without the axis N, is taken where its shape allows no other
                reading. Real numbers in rows of D are features; an array of any other shape or type is inputs
                (N, ...), such as images, and so is a list of texts, PIL images, or audio clips {"array": (T,), "sampling_rate":
                Hz} if the model has its own preprocessing, or of texts as lists of words, which are the examples; a single text, image or clip is one example. If inputs are themselves rows of D real numbers, call
                run.predict(run.features(x)). A posterior over other layers takes inputs or the name of a split.
            posterior: name or file; by default what `auto` recommends, else laplace.
            integrator: by default plug-in for the network, mc for other posteriors.
            samples: number of draws of a sampling integrator; None for its default.
            settings: settings of the integrator, such as qmc=True.

        Raises:
            UsageError: the integrator, a setting or a value does not exist or does not fit the posterior.
            MissingInput: there is no such posterior.
            DataError: x is neither features nor inputs, or not finite; a file is stale, damaged or belongs to another checkpoint.
            Untrusted: the network is your own code, and `open` was called without `model`.
        """
        with self.session.computing(allow_stale=allow_stale) as run:
            posterior, integrator = _choose_posterior(run, posterior, integrator)
            options = check_request(integrator, samples, settings)
            predictor = self._predictor(run, posterior)
            header = predictor.header
            with guard_user_network(predictor):
                layout = predictor.posterior.layout
                choice = choose_predictor(options, header, layout.num_classes)
                of_network = is_of_network(header)
                features = (
                    self._inputs(run, x, predictor)
                    if of_network
                    else self._features(
                        lambda: self._input_network(run), x, lambda: self._input_shape(run), layout.num_features
                    )
                )
                warn_of_draws(run, predictor.path, header, choice.name)
                warn_of_few_draws(run, predictor.path, header, samples)
                return predict(predictor, choice, features, tuple(posterior_classes(run.folder, header)))

    def ood_scores(
        self, x: str | ArrayLike | Tensor | Image | Sequence[Image], *, allow_stale: bool = False
    ) -> NDArray[np.float32]:
        """Return out-of-distribution scores (N,) of N examples: higher is farther from the training data.

        This is the score `combined` of tables and prediction files with its sign turned, as `ood_score` in exported files. It is the
        same for all posteriors. The first call fits it to the splits train and val.

        Args:
            x: as in `predict`.

        Raises:
            DataError: x is neither features nor inputs, or not finite; or the run has no splits train and val to fit the score to.
        """
        with self.session.computing(allow_stale=allow_stale) as run:
            train = self._scored(run)
            if train.detector is None:
                message = f"no score {DEFAULT_SCORE}: it needs features of train and of at least {FEWEST_ROWS} examples of val"
                raise DataError(message, code="no_score")
            num_features = train.detector_splits[0].stored.shape[1]
            network, shape = partial(self._input_network, run), partial(self._input_shape, run)
            scores: NDArray[np.float32] = (
                -train.detector.scores(self._features(network, x, shape, num_features)).float().numpy()
            )
            return scores

    def predictor(
        self,
        posterior: str | None = None,
        *,
        integrator: str | None = None,
        samples: int | None = None,
        allow_stale: bool = False,
        **settings: str | float | bool | None,
    ) -> LoadedPredictor:
        """Return a function that predicts as `predict` does, with files read and checked once, now.

        Raises:
            UsageError, MissingInput, DataError: as `predict`.
            DeviceError: the posterior does not fit into memory.
        """
        from bnncli.api.predictions import LoadedPredictor

        with self.session.computing(allow_stale=allow_stale) as run:
            shared, choice = self._choose(run, posterior, integrator, samples, settings)
            predictor = replace(shared)
            predictor.__dict__["posterior"] = shared.posterior  # shared weights, separate integrator
            predictor.ready(choice)
            classes = tuple(posterior_classes(run.folder, predictor.header))
            reader = self._reader(run, shared.posterior.layout.num_features)
            own: dict[str, Any] = {
                "integrator": choice.name,
                "samples": samples,
                "allow_stale": allow_stale,
                **settings,
            }
            again = partial(self.predictor, str(predictor.path.absolute()), **own)
            return LoadedPredictor(classes, self.session, predictor, choice, reader, again)

    fit_calibration = CommandMethod("fit-calibration")
    fit_temperature = CommandMethod("fit-temperature")
    fit_laplace = CommandMethod("fit-laplace")
    refine = CommandMethod("refine")
    hmc = CommandMethod("hmc")
    stack = CommandMethod("stack")
    auto = CommandMethod("auto")
    predict_splits = CommandMethod("predict")
    evaluate = CommandMethod("evaluate")
    compare = CommandMethod("compare")
    diagnose = CommandMethod("diagnose")
    calibrate = CommandMethod("calibrate")
    monitor = CommandMethod("monitor")
    report = CommandMethod("report")

    def module(
        self,
        posterior: str | None = None,
        integrator: str | None = None,
        *,
        inputs: bool = False,
        samples: int | None = None,
        allow_stale: bool = False,
        **settings: str | float | bool | None,
    ) -> nn.Module:
        """Return a torch module that predicts: features (N, D) to a dict of `probs`, `entropy` and, with draws, `mutual_information`.

        It is on the CPU, holds copies, reads no files, can be pickled, and works in torch.compile and torch.export. Its outputs
        equal those of `predict` to float32 rounding.

        Args:
            inputs: whether it takes inputs of the module that `from_torch` was given, which it then has a copy of.
            posterior, integrator, samples, allow_stale, settings: as for `predict`.

        Raises:
            UsageError, MissingInput, DataError: as `predict`, or the integrator has no such form.
        """
        from bnncli.export.network import FeatureNetwork, WholeNetwork
        from bnncli.export.parts import head_parts

        with self.session.computing(allow_stale=allow_stale) as run:
            if inputs and self.module_network is None:
                raise UsageError("inputs: expected a run of from_torch", hint="bnncli export writes whole networks")
            predictor, choice = self._choose(run, posterior, integrator, samples, settings)
            parts = head_parts(copy.deepcopy(predictor.posterior).to("cpu"), choice.integrator, predictor.ready(choice))
            head: nn.Module = parts.module()
            if not inputs or self.module_network is None:
                return head
            self.module_network.check_weights()
            model = copy.deepcopy(self.module_network.module).eval().requires_grad_(False).cpu()
            return WholeNetwork(FeatureNetwork(model, self.module_network.head, None), head).eval()

    def _choose(
        self, run: Run, name: str | None, integrator: str | None, samples: int | None, settings: dict[str, Any]
    ) -> tuple[Predictor, IntegratorChoice]:
        """Return a posterior over the last layer and the integrator that were asked for."""
        name, integrator = _choose_posterior(run, name, integrator)
        options = check_request(integrator, samples, settings)
        predictor = self._predictor(run, name)
        if is_of_network(predictor.header):
            message = f"{name} covers other layers than the last, so its layers are loaded at each call: use predict"
            raise UsageError(message)
        return predictor, choose_predictor(options, predictor.header, predictor.posterior.layout.num_classes)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached weights, to pickle the run; its files stay where they are."""
        return {**vars(self), "_predictors": {}, "_scores": None, "_network": None}

    def _reader(self, run: Run, num_features: int) -> Callable[[Any], Tensor]:
        """Return a function from features or inputs to features; it opens the network once, on the first inputs."""
        opened: list[InputNetwork | ModuleNetwork] = []
        shape = self._input_shape(run)

        def network() -> InputNetwork | ModuleNetwork:
            if not opened:
                opened.append(self._input_network(run))
            return opened[0]

        return lambda x: self._features(network, x, lambda: shape, num_features)

    def _input_shape(self, run: Run) -> Sequence[int] | None:
        """Return the shape of the network's input for one example; None if it was not recorded."""
        if self.module_network is not None:
            return self.module_network.input_shape
        found = reference_of(run)
        return None if found is None else found[1].get("shape")

    def _features(
        self,
        opened: Callable[[], InputNetwork | ModuleNetwork],
        x: Any,
        shape: Callable[[], Sequence[int] | None],
        num_features: int,
    ) -> Tensor:
        """Return features (N, D) from features or inputs."""
        given = convert_to_items(x)
        tensor = convert_to_tensor(x, shape, num_features) if given is None else given
        if not isinstance(tensor, Items) and is_features(tensor, num_features):
            return convert_feature_dtype(tensor)
        try:
            network = opened()
        except DataError as error:
            if error.code != "no_network":
                raise
            message = f"x: expected floating-point features (N, {num_features}); got {describe_inputs(tensor)}"
            raise DataError(f"{message}; {error.message}", hint=error.hint, code="bad_shape") from None
        features = network.features(tensor)
        if features.shape[1] != num_features:
            message = f"the network gives {features.shape[1]} features, but the posterior expects {num_features}"
            raise DataError(message, code="wrong_layout")
        return features

    def _inputs(self, run: Run, x: Any, predictor: Predictor) -> Tensor:
        """Return the inputs (N, D) of a posterior over other layers, from inputs or a split's name."""
        reader, layout = predictor.train.reader, predictor.posterior.layout
        if isinstance(x, str) and x in self.splits:
            return predictor.train.seen_by(predictor.header, load_split(run, x)).stored
        network = self._input_network(run)
        assert isinstance(network, InputNetwork)  # a module has posteriors over its last layer only
        given = convert_to_items(x)
        tensor = convert_to_tensor(x, lambda: self._input_shape(run)) if given is None else given
        try:
            return reader.given_inputs(network.split_of(tensor), layout)
        except DataError as error:
            if error.code != "wrong_inputs":
                raise
            expected = (
                f"inputs of the network {network.network.spec!r}, because the posterior covers other layers than "
                "the last"
            )
            message = f"x: expected {expected}; got {describe_inputs(tensor)}: {error.message}"
            raise DataError(message, code="wrong_inputs") from error

    def _layers_network(self, run: Run) -> RecordedNetwork:
        """Return a second copy of the run's network, because posteriors over other layers may change its attention."""
        from bnncli.session.network import RecordedNetwork, network_header, open_recorded

        return open_recorded(RecordedNetwork, run, network_header(run), self._named_model())

    def _predictor(self, run: Run, name: str) -> Predictor:
        """Return the predictor of a posterior, reused while its file and that of train are unchanged."""
        self._forget_other_weights()
        path = find_named(run, check_text("posterior", name), flag="\0posterior\0", otherwise=run.suggest("status"))
        header, _ = posterior_source(run, path, "posterior")
        train = _digest_of(run, "train")
        known, known_train = self._predictors.get(path, (None, None))
        if known is None or (known.header.content_digest, known_train) != (header.content_digest, train):
            data = TrainData(run, trusts_code=self._model is not None, opener=lambda: self._layers_network(run))
            known = Predictor(run, path, header, data)
            self._predictors[path] = known, train
        return known

    def _scored(self, run: Run) -> TrainData:
        """Return the data with the fitted out-of-distribution score, reused while train and val are unchanged."""
        digests = [_digest_of(run, "train"), _digest_of(run, "val")]
        if self._scores is None or self._scores[0] != digests:
            self._scores = digests, TrainData(run)
        return self._scores[1]

    def _input_network(self, run: Run) -> InputNetwork | ModuleNetwork:
        """Return the run's network, reused while its features and code are unchanged."""
        from bnncli.session.network import network_header, open_recorded

        if self.module_network is not None:
            return self.module_network
        self._forget_other_weights()
        self._network = open_recorded(InputNetwork, run, network_header(run), self._named_model(), self._network)
        return self._network

    def _named_model(self) -> str | None:
        """Return the caller's network name, with its path relative to the current folder."""
        model = self._model
        if model is not None and ".py:" in model:
            model = self.session.placed(model)
        elif model is not None and is_kind(model):
            kind, _, place = model.partition(":")
            elsewhere = self.session.placed(place)
            model = f"{kind}:{elsewhere}" if os.path.exists(elsewhere) else model  # a place may be a name
        return model

    def _forget_other_weights(self) -> None:
        """Drop cached objects if the checkpoint has changed or was named otherwise."""
        now = self.session.folder, self.session.checkpoint_state
        if now != (self._folder, self._checkpoint_state):
            (self._folder, self._checkpoint_state), self._network = now, None
            self._predictors.clear()


def _choose_posterior(run: Run, posterior: str | None, integrator: str | None) -> tuple[str, str | None]:
    """Return auto's recommendation if neither was named, like `bnncli predict`; else the posterior, laplace by default."""
    if posterior is None and integrator is None and (found := open_recommendation(run)) is not None:
        return found.posterior, found.integrator
    return posterior or "laplace", integrator


def _digest_of(run: Run, split: str) -> str | None:
    """Return the digest of a split's current features; None if unreadable, which is reported to its readers."""
    try:
        return read_header(run.folder.features(split)).content_digest
    except BnnError:
        return None


def open_run(
    ckpt: str | PathLike[str],
    *,
    run_dir: str | PathLike[str] | None,
    device: str,
    seed: int,
    model: str | None,
) -> OpenedRun:
    """Open the run of a checkpoint for `bnncli.open`."""
    with convert_errors_to_python():
        model = None if model is None else check_text("model", model)
    return OpenedRun(open_session(ckpt, run_dir, device=device, seed=seed), model)
