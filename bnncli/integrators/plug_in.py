"""Plug-in prediction: the class probabilities at one theta, as a network without uncertainty predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from bnncli.integrators import (
    HasLayout,
    Integrator,
    Prediction,
    check_features,
    examples_at_once,
    require_support,
    slices,
)
from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.evaluation.calibration_maps import CalibrationMap


class HasCenter(HasLayout, Protocol):
    """A posterior with a representative theta: the point, the Gaussian's mean, the mean of the draws."""

    @property
    def center(self) -> Tensor | None:
        """Return theta (P,), or None where there is no such point."""


@dataclass(frozen=True)
class PlugIn(Integrator):
    """Class probabilities of the logits at the posterior's center."""

    needs: ClassVar[str] = "center"

    def predict(
        self,
        posterior: HasCenter,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities at the posterior's center.

        Args:
            posterior: with a center; for a samples posterior, the mean of the draws.
            features: (N, D).
            num_samples: not used, there are no draws.
            generator: not used.
            progress: advances once per example.

        Raises:
            UsageError: the posterior has no center.
        """
        require_support("plug-in", posterior)
        center = posterior.center
        assert center is not None
        calibration = getattr(posterior, "calibration", None)
        return predict_at(posterior.layout, center, features, progress, calibration)


def predict_at(
    layout: ClassifierLayout,
    theta: Tensor,
    features: Tensor,
    progress: Progress,
    calibration: CalibrationMap | None = None,
) -> Prediction:
    """Return class probabilities of features (N, D) under one theta (P,), through a calibration map if there is one."""
    check_features(layout, features)
    stacked = theta.to(features).unsqueeze(0)
    probs = features.new_empty(features.shape[0], layout.num_classes, dtype=torch.float32)
    task = progress.task("predict", features.shape[0])
    for rows in slices(features.shape[0], examples_at_once(features, layout.widest)):
        logits = layout.logits(features[rows], stacked)[0]
        if calibration is None:
            probs[rows] = layout.likelihood.class_probabilities(logits, dim=1)
        else:
            classes = layout.likelihood.balanced_class_logits(logits, dim=1)
            probs[rows] = calibration.probs(classes).float()
        task.advance(rows.stop - rows.start)
    return Prediction.from_probs(probs, is_exclusive=layout.likelihood.is_exclusive)
