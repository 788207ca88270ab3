"""One small file for each family of parts, to be added to a copy of the package or installed as a distribution's."""

from __future__ import annotations

FLOW = '''
"""A shift of theta."""

from __future__ import annotations

import torch
from torch import nn

from bnncli.flows import PUBLISHED, SPACES, load_tensors, tensors_of
from bnncli.options.declaration import Setting

SETTINGS = {"NAME_push": Setting("How far NAME pushes; {default} by default", float, 1.0)}


class CLASS(nn.Module):
    recipe, settings, spaces, maps = PUBLISHED, tuple(SETTINGS), SPACES, "z + push shift"

    def __init__(self, layout, generator, *, NAME_push=SETTINGS["NAME_push"].default):
        super().__init__()
        self.NAME_push = NAME_push
        self.shift = nn.Parameter(torch.zeros(layout.num_params, dtype=torch.float64, device=generator.device))
        self.register_buffer("push", torch.tensor([NAME_push], dtype=torch.float64, device=generator.device))

    def forward(self, z):
        return z + self.push * self.shift, z.new_zeros(len(z))

    def inverse(self, y):
        return y - self.push * self.shift

    def to_tensors(self):
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors, layout):
        return load_tensors(cls(layout, torch.Generator(), NAME_push=float(tensors["push"])), tensors)

    def summary(self):
        return {"shift_norm": float(self.shift.norm())}
'''

INTEGRATOR = '''
"""The network at the centre, mixed with equal probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bnncli.integrators import Integrator, Prediction, require_support
from bnncli.options.declaration import Setting
from bnncli.progress import SILENT

SETTINGS = {"blend": Setting("Share of equal probabilities; {default} by default", float, 0.25, minimum=0, maximum=1)}


@dataclass(frozen=True)
class CLASS(Integrator):
    needs: ClassVar[str] = "center"
    blend: float = SETTINGS["blend"].default

    def predict(self, posterior, features, *, num_samples, generator, progress=SILENT):
        require_support("NAME", posterior)
        logits = posterior.layout.logits(features, posterior.center.to(features).unsqueeze(0))[0]
        probs = torch.softmax(logits, dim=1)
        return Prediction.from_probs((1 - self.blend) * probs + self.blend / probs.shape[1])
'''

NETWORK = '''
"""Two layers."""

from torch import nn


def build(width=5):
    return nn.Sequential(nn.Linear(4, int(width)), nn.ReLU(), nn.Linear(int(width), 3))
'''

MODEL = '''
"""`NAME:FILE`: two layers, whose weights are numbers in a text file."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bnncli.options.declaration import Form

FORM = Form("NAME:FILE")
EXTRA = None
TAKES = ("feature_node",)


@dataclass(frozen=True)
class Saved:
    files: tuple
    classes = ("low", "middle", "high")
    transform = task = None

    def build(self, state):
        import torch
        from torch import nn

        network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        if state is None:
            state = network.state_dict()
            numbers = torch.from_numpy(np.loadtxt(self.files[0])).float().split([t.numel() for t in state.values()])
            state = {name: part.reshape(old.shape) for part, (name, old) in zip(numbers, state.items(), strict=True)}
        network.load_state_dict(state)
        return network.eval()


def open_model(place, asked):
    return Saved((Path(place),))
'''

DATA = '''
"""`NAME:FILE`: numbers in a text file, a row an example, the last one its label."""

from pathlib import Path

import numpy as np

from bnncli.data.arrays import array_dataset
from bnncli.options.declaration import Form

FORM = Form("NAME:FILE")


def exists(place):
    return Path(place).is_file()


def open_dataset(place, preprocess):
    rows = np.loadtxt(place)
    return array_dataset(rows[:, :-1].astype(np.float32), rows[:, -1].astype(np.int64), where=f"NAME:{place}")
'''

COMMAND = '''
"""NAME: says its name."""

from bnncli.options.command import READ, Command, own_options
from bnncli.options.declaration import option

COMMAND = Command(
    "Say NAME.",
    "Nothing is written.",
    (own_options(times=option(2, "How often.", minimum=1)), *READ),
    ("bnncli NAME ckpt.pt",),
    place=95,
)


def execute(run, options):
    from bnncli.session.run import Result

    return Result(lines=[f"NAME {run.checkpoint_path.name}"] * options.times)
'''

SCORE = '''
"""NAME: the mean probability of the label."""

from bnncli.evaluation.scores import Score


def of_split(split):
    from bnncli.evaluation.statistics import ScoreForm, means

    return [means([ScoreForm("NAME", {"classes": "all"}, True, bounds=(0.0, 1.0))], [split.examples.label_probability])]


SCORE = Score(title="NAME", digits=3, of_split=of_split)
'''

STRUCTURE = '''
"""One variance for all parameters, from a multiple of the identity with the Hessian's trace."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from bnncli.structures import Operations
from bnncli.structures.diag import LastLayerDiag, NetworkDiag


@dataclass(frozen=True)
class CLASS:
    structure: ClassVar[str] = "NAME"
    variance: Tensor
    num_params: int

    @classmethod
    def from_hessian(cls, hessian, prior, layout):
        return cls(1 / (hessian["hessian.NAME"].double() + prior.weight_precision), layout.num_params)

    def unwhiten(self, z):
        return z.to(self.variance) * self.variance.sqrt()

    def whiten(self, x):
        return x.to(self.variance) / self.variance.sqrt()

    def pull_back(self, gradient):
        return self.unwhiten(gradient)

    def log_det_scale(self):
        return 0.5 * self.num_params * math.log(float(self.variance))

    def to_tensors(self):
        return {"cov.NAME": self.variance.double().cpu().contiguous()}

    @classmethod
    def from_tensors(cls, tensors, layout):
        return cls(tensors["cov.NAME"], layout.num_params)

    def to(self, *, device=None, dtype=None):
        return replace(self, variance=self.variance.to(device=device, dtype=dtype))


class LastLayerCLASS:
    order: "ClassVar[int]" = 35
    about: "ClassVar[str]" = "one variance for all"
    is_exact: "ClassVar[bool]" = False
    is_same_in_span: "ClassVar[bool]" = False
    is_fitted_in_span: "ClassVar[bool]" = False
    fixed: "ClassVar[tuple[str, ...]]" = ()

    @staticmethod
    def hessian(target, theta):
        diagonal = LastLayerDiag.hessian(target, theta)["hessian.diag"]
        return {"hessian.NAME": diagonal.mean().reshape(1)}

    @staticmethod
    def num_elements(layout):
        return 1

    @staticmethod
    def operations(layout, num_examples):
        return Operations(elementwise=2 * num_examples * layout.num_params)

    @staticmethod
    def most_elements(layout, *, largest_full, in_span):
        return 0  # never unasked


class NetworkCLASS:
    order: "ClassVar[int]" = 65
    about: "ClassVar[str]" = "one variance for all"
    is_exact: "ClassVar[bool]" = False
    fixed: "ClassVar[tuple[str, ...]]" = ()

    @staticmethod
    def hessian(target, theta):
        return {"hessian.NAME": NetworkDiag.hessian(target, theta)["hessian.diag"].mean().reshape(1)}

    @staticmethod
    def num_elements(layout):
        return 1
'''

# Without it, the logits are pulled back through theta.
HEAD_LOGITS = """

def _head_logits(covariance, layout):
    return Spread(covariance.variance, layout)


CLASS.head_logits = _head_logits


class Spread:
    is_dense = False

    def __init__(self, variance, layout):
        self.of_theta, self.layout = variance, layout

    def variance(self, inputs):
        squared = self.layout.augment_features(inputs).square().sum(dim=1, keepdim=True)
        return (squared * self.of_theta).to(inputs.dtype).expand(-1, self.layout.num_outputs)

    def projected_variance(self, inputs):
        return self.variance(inputs) * (1 - 1 / self.layout.num_outputs)

    def covariance(self, inputs):
        return self.variance(inputs).diag_embed()

    def root(self, inputs):
        from bnncli.structures.logits import LogitRoot

        return LogitRoot(self.variance(inputs).sqrt())
"""

DETECTOR = '''
"""NAME: the sum of the squared class probabilities."""

from bnncli.evaluation.detectors import Detector

DETECTOR = Detector(of_predictions=lambda examples, values: examples.squared_norm)
'''

FAMILIES = {
    "flows": FLOW,
    "integrators": INTEGRATOR,
    "networks": NETWORK,
    "models": MODEL,
    "data": DATA,
    "scores": SCORE,
    "commands": COMMAND,
    "detectors": DETECTOR,
    "structures": STRUCTURE,
}
OURS = dict(
    zip(FAMILIES, ("swirl", "middle", "tiny", "kept", "rows", "sureness", "greet", "peak", "round"), strict=True)
)
THEIRS = dict(
    zip(
        FAMILIES,
        ("eddy", "halfway", "little", "stored", "lines", "aplomb", "salute", "crest", "ball"),
        strict=True,
    )
)


def text_of(family: str, name: str) -> str:
    """The file of a part of this name."""
    text = FAMILIES[family] + (HEAD_LOGITS if name == THEIRS["structures"] else "")
    return text.replace("CLASS", name.capitalize()).replace("NAME", name).lstrip()
