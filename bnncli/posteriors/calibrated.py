"""A single theta whose class logits go through a calibration map."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.evaluation.calibration_maps import CalibrationMap, open_map
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Calibrated:
    """All mass on theta (P,). Without `sample`, so that only plug-in, which applies the map, predicts with it."""

    type: ClassVar[str] = "calibrated"
    theta: Tensor
    layout: HeadLayout
    calibration: CalibrationMap

    def __post_init__(self) -> None:
        check_shapes(theta=(self.theta, str(self.layout.num_params)))

    @property
    def center(self) -> Tensor:
        """Return theta, (P,)."""
        return self.theta

    def to(self, device: torch.device | str) -> Calibrated:
        """Return a copy on another device."""
        return replace(self, theta=self.theta.to(device), calibration=self.calibration.to(device))

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `mean` (P,) and the tensors of the map, float64; its name and the layout as JSON."""
        tensors = {"mean": self.theta.double().cpu().contiguous(), **self.calibration.tensors}
        return tensors, {"type": self.type, "map": self.calibration.name, **self.layout.to_meta()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Calibrated:
        """Invert to_tensors. Raises ValueError for an unknown map."""
        layout = HeadLayout.from_meta(meta)
        return cls(tensors["mean"], layout, open_map(str(meta["map"]), tensors, layout.likelihood))
