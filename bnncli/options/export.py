"""Options of export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, collected, option

FORMATS = {"onnx": ".onnx", "pt2": ".pt2", "torch": ".safetensors"}  # and what the files end in
EXPORTED_SCORES = (
    "combined",
    "max_prob",
    "entropy",
    "mutual_info",
    "energy",
    "max_logit",
)  # detectors that need nothing but the head
DEFAULT_DRAWS = 100
TOLERANCES = {"float32": 1e-5, "float16": 1e-2}  # of probabilities


@dataclass(frozen=True)
class ExportOptions(Checked):
    """Options of export, `settings` being those that integrators declare."""

    posterior: str | None = option(
        None,
        "Posterior over the last layer, by name or file; what auto recommends where it is left out.",
        metavar="NAME|FILE",
        numeric=False,
    )
    integrator: str | None = option(
        None,
        "How the posterior becomes probabilities; as predict has it by default. probit, mean-field, bridge and plug-in are small and "
        "exact; of mc draws are stored.",
        family="integrators",
        numeric=False,
    )
    settings: dict[str, Any] = collected("integrators", numeric=False)
    format: str = option(
        "onnx",
        "onnx (a graph, for onnxruntime and others), pt2 (a program of torch.export), or torch (a safetensors file and the Python "
        "module that reads it, which needs no bnncli; of the head alone).",
        choices=tuple(FORMATS),
    )
    head_only: bool = option(
        False, "Export the head alone, which takes features; otherwise the network, which takes inputs, is in the file."
    )
    draws: int = option(
        DEFAULT_DRAWS,
        "Draws that are stored, where there are more: evenly chosen among those of predict. What that loses in NLL is said.",
        minimum=1,
    )
    dtype: str = option(
        "float32",
        "Numbers are stored in this type, float32 or float16, and computed with as float32.",
        choices=tuple(TOLERANCES),
    )
    score: str | None = option(
        None,
        "What ood_score is: one of the scores of evaluate, its sign turned, so that higher is farther from the training data; combined "
        "by default, mutual_info or max_prob where the run lacks the splits train and val.",
        choices=EXPORTED_SCORES,
    )
    decide: list[str] = option(
        [],
        "Put what this rule of calibrate decides by into the file: prediction sets as the output `set`, thresholds of ood and risk "
        "beside its outputs' names. By its name, such as sets; rules of aps and raps that draw numbers are refused. Repeatable.",
        metavar="NAME",
    )
    tolerance: float | None = option(
        None,
        "Publish nothing when a probability of the file is farther than this from that of predict: 1e-5, of float16 1e-2.",
        minimum=0,
        maximum=1,
        numeric=False,
    )
    trust_code: bool = option(
        False,
        "Run the code that the run's features were made by (a network of file.py:factory, package.module:factory or jit:, data of "
        "py:), which the whole network needs. Without it a run folder that somebody else made runs nothing.",
        numeric=False,
    )

    def check_together(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.format == "torch" and not self.head_only:
            raise UsageError(
                "\0format\0 torch has the head alone, as the network's code is your own", hint="add \0head_only\0"
            )
        if self.head_only and self.trust_code:
            raise UsageError("\0trust_code\0 is for the whole network: \0head_only\0 runs no code")

    @property
    def own_tolerance(self) -> float:
        """The one that was given, or that of the type."""
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance
