"""That distance less the one to all examples: Ren et al. (2021), arXiv 2106.09022."""

from __future__ import annotations

from bnncli.detectors import Detector

DETECTOR = Detector(place=9, computed_by="mahalanobis")
