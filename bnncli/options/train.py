"""Options of train, and the published recipes that set them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bnncli.errors import UsageError
from bnncli.options import shared
from bnncli.options.declaration import Checked, option
from bnncli.registry import check_name, has_name, names

OPTIMIZERS = ("adam", "adamw", "sgd", "nesterov")
SCHEDULES = ("cosine", "step", "constant")
AUGMENTATIONS = ("none", "flip", "crop", "crop+flip")

# What training does where nothing is said: the settings of Kristiadi, Eschenhagen and Hennig (2022) for Fashion-MNIST.
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
class TrainOptions(Checked):
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
        """The options with the recipe's settings, and the defaults, in place of those that were left open.

        Raises:
            UsageError: no network, no training split, an option that the others leave nothing to do.
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
        """The options that change numbers, once resolved: what a checkpoint records."""
        found = self.params()
        del found["recipe"], found["data"]  # another way to say the others; what lies there tells its content
        found["model_arg"] = sorted(found["model_arg"])
        if self.optimizer not in ("sgd", "nesterov"):
            del found["momentum"]
        if "crop" not in (self.augment or ""):
            del found["padding"]
        return found
