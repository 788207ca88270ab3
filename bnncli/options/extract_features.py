"""Options of extract-features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bnncli.errors import UsageError
from bnncli.machine.input_files import reading
from bnncli.names import listed, quoted
from bnncli.numerics.corruptions import CORRUPTIONS, NUM_SEVERITIES
from bnncli.options import network_inputs
from bnncli.options.declaration import Checked, option
from bnncli.options.parts import declaration, forms
from bnncli.options.shift import check_corruption
from bnncli.registry import check_name, has_name, names

NO_NETWORK = "flatten"
IDENTITY = "identity"  # as the name of a last layer: an identity layer on the network's own logits
EITHER = "give either \0model\0 MODEL with \0data\0 SPLIT=SPEC, or \0from_npz\0 FILE"


def _model_help() -> str:
    built_in = ", ".join(name for name in names("networks") if name != NO_NETWORK)
    return (
        f"Network: a built-in name ({built_in}; {NO_NETWORK} is none: inputs are the features, CKPT is just the run's "
        f"name), a saved model ({', '.join(forms('models'))}), package.module:factory or file.py:factory. A factory is "
        "your code and is run; so is a TorchScript program (jit), as far as it calls PyTorch's operators on tensors. "
        "With a model that has weights of its own, CKPT is just the run's name."
    )


def _corrupt_help() -> str:
    return (
        f"Corrupt the images of the splits given here: {', '.join(CORRUPTIONS)}, at severities 1 to {NUM_SEVERITIES}, which "
        "are this tool's own (not CIFAR-10-C's); noise is seeded for each row."
    )


@dataclass(frozen=True)
class ExtractFeaturesOptions(Checked):
    """Options of extract-features."""

    model: str | None = option(
        None,
        _model_help,
        metavar="MODEL",
    )
    model_arg: list[str] = network_inputs.model_arg()
    base_model: str | None = option(
        None, "Folder of the model that an adapter (\0model\0 peft:DIR) was trained on.", metavar="DIR"
    )
    feature_node: str | None = option(
        None,
        "Name of the node of a graph whose output is the features, when it is not the one before the last linear layer.",
        metavar="NAME",
    )
    allow_download: bool = option(
        False, "Let \0model\0 fetch what is not on this machine; never done otherwise.", numeric=False
    )
    data: list[str] = network_inputs.data()
    ood: list[str] = option(
        [],
        "An out-of-distribution split, stored without labels; SPEC as for \0data\0 (with \0from_npz\0 the name alone). Repeatable.",
        metavar="SPLIT=SPEC",
    )
    hold_out: list[str] = network_inputs.hold_out()
    from_npz: str | None = option(
        None,
        "Arrays of your own extractor: features_<split>, labels_<split>, head_weight, head_bias. CKPT is then just the run's name.",
        metavar="FILE",
    )
    classes: str | None = option(
        None,
        "Names of the classes in the order of the network's outputs: a file with one a line, or a,b,c. Without it names that "
        "the network does not have are numbered in alphabetical order.",
        metavar="FILE|A,B,C",
    )
    task: str | None = network_inputs.task()
    last_layer: str | None = option(
        None,
        "Name of the last linear layer, when it is not the last one called; or identity, for networks whose logits are not "
        "linear in any features: an identity layer on these logits.",
        metavar="NAME",
    )
    output: str | None = option(
        None,
        "Which of the network's outputs its logits are, by name or place (0, 1, ...), when it returns several.",
        metavar="NAME",
    )
    state: str | None = option(
        None,
        "Which weights of a checkpoint that has several, by the dotted key that inspect lists, or ema for the averaged ones.",
        metavar="NAME",
    )
    mean: str | None = network_inputs.mean()
    std: str | None = network_inputs.std()
    resize: int | None = network_inputs.resize()
    crop: int | None = network_inputs.crop()
    no_exif: bool = network_inputs.no_exif()
    background: str | None = network_inputs.background()
    rotate: float | None = option(
        None,
        "Turn the images of the splits given here by so many degrees, counter-clockwise, black outside: shifted copies of a "
        "split may stand beside it, as rot30=npz:test.npz.",
        minimum=-360,
        maximum=360,
        metavar="DEGREES",
    )
    corrupt: str | None = option(None, _corrupt_help, metavar="KIND:SEVERITY", check=check_corruption)
    dtype: str = option("float32", "Type the features are stored in.", choices=("float32", "float16"))
    autocast: str | None = option(
        None,
        "Let the network compute in lower precision (torch.autocast), which GPUs and newer CPUs are faster in; how far its "
        "logits are from float32's is said.",
        choices=("bf16", "fp16"),
    )
    batch_size: int = option(256, "Inputs a batch.", minimum=1, numeric=False)
    num_workers: int = network_inputs.num_workers()

    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every batch.",
        minimum=0,
        numeric=False,
    )

    @property
    def has_network(self) -> bool:
        """Whether features come out of a network, and are not ready."""
        return self.from_npz is None and self.model != NO_NETWORK

    @cached_property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes; None where none are given. Raises UsageError for fewer than two, or one twice."""
        return None if self.classes is None else _class_names(self.classes)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is not None and self.from_npz is not None:
            raise UsageError("\0classes\0 needs \0model\0: with \0from_npz\0 labels are numbers")
        if self.model is not None and self.from_npz is not None:
            raise UsageError(EITHER)
        if self.model is not None and ":" not in self.model:
            if has_name("models", self.model):
                raise UsageError(
                    f"\0model\0: expected {declaration('models', self.model, 'FORM').text}; got {self.model!r}"
                )
            others = [*forms("models"), "package.module:factory", "file.py:factory"]
            check_name("networks", self.model, option="\0model\0", also=others)
        given = [name for name in ("base_model", "feature_node", "allow_download") if getattr(self, name)]
        if self.model is not None and given and not has_name("models", self.model.partition(":")[0]):
            raise UsageError(f"\0{given[0]}\0 needs a saved model: \0model\0 {', '.join(forms('models'))}")
        if self.autocast is not None and self.model in (None, NO_NETWORK):
            raise UsageError("\0autocast\0 is about a network, and there is none")
        if self.model == NO_NETWORK and self.state is not None:
            raise UsageError("\0state\0 needs a network whose checkpoint has several states")
        for name in ("last_layer", "output"):
            if self.model == NO_NETWORK and getattr(self, name) is not None:
                raise UsageError(f"\0{name}\0 needs a network; with \0model\0 {NO_NETWORK} inputs are the features")
        if self.model is not None and not (self.data or self.ood):
            raise UsageError("\0data\0: give at least one split, as \0data\0 train=npz:train.npz")


def _class_names(text: str) -> tuple[str, ...]:
    """The names of the classes in a file, one a line, or joined by commas. Raises UsageError for fewer than two, or one twice."""
    path = Path(text).expanduser()
    if "\n" not in text and path.is_file():
        with reading(path):
            text = path.read_text(encoding="utf-8-sig", errors="replace")
        lines = text.splitlines()
    else:
        lines = text.split("\n" if "\n" in text else ",")
    names = tuple(name for line in lines if (name := line.strip()))
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if len(names) < 2 or twice:
        found = f"{quoted(twice[0])} twice" if twice else listed(names) or "none"
        raise UsageError(
            f"\0classes\0: expected the names of at least two classes, in the order of the network's outputs; got {found}",
            hint="give a file with one name a line, or a,b,c",
        )
    return names
