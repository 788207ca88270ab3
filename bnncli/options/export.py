"""Options of export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.names import FORMATS
from bnncli.options.declaration import Checked, collected, option

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
        "Posterior over the last layer, by name or file. Default: auto's recommendation.",
        metavar="NAME|FILE",
        numeric=False,
        group="What to export",
    )
    integrator: str | None = option(
        None,
        "Integrator; mc stores draws, the others give small files that reproduce predict. Default: the one "
        "predict uses.",
        family="integrators",
        numeric=False,
        group="What to export",
    )
    settings: dict[str, Any] = collected("integrators", numeric=False)
    format: str = option(
        "onnx",
        "File format: onnx (for onnxruntime), pt2 (torch.export), or torch (safetensors with a Python module, "
        "head only).",
        choices=tuple(FORMATS),
        group="Output",
    )
    head_only: bool = option(
        False, "Export only the head, which takes features instead of inputs.", group="What to export"
    )
    draws: int = option(
        DEFAULT_DRAWS,
        "Maximum number of draws to store. The summary reports the loss in NLL.",
        minimum=1,
        group="What to export",
    )
    dtype: str = option(
        "float32", "Storage type. Computation uses float32.", choices=tuple(TOLERANCES), group="Output", is_rare=True
    )
    score: str | None = option(
        None,
        "Score to export as the output ood_score; higher means farther from the training data. Default: "
        "combined, else mutual_info or max_prob.",
        choices=EXPORTED_SCORES,
        group="What to export",
        is_rare=True,
    )
    decide: list[str] = option(
        [],
        "Store this calibrated rule in the file (rule names such as sets). Randomised aps and raps rules are refused.",
        metavar="NAME",
        group="What to export",
    )
    tolerance: float | None = option(
        None,
        "Refuse to publish if a probability differs from predict's by more than this value. Default: 1e-5; float16 1e-2.",
        minimum=0,
        maximum=1,
        numeric=False,
        group="Output",
        is_rare=True,
    )
    trust_code: bool = option(
        False,
        "Execute the code that the run folder names (network factory, jit, py: data). Without this option, no "
        "such code runs.",
        numeric=False,
        group="What to export",
    )

    def check_together(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.format == "torch" and not self.head_only:
            raise UsageError("\0format\0 torch exports only the head", hint="add \0head_only\0")
        if self.head_only and self.trust_code:
            raise UsageError("\0trust_code\0 applies to whole networks; \0head_only\0 runs no code")

    @property
    def own_tolerance(self) -> float:
        """The one that was given, or that of the type."""
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance
