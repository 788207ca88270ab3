"""What predictions over a whole network will take of the memory, and the refusal of what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.session.inputs import Split
from bnncli.session.predictor import IntegratorChoice

if TYPE_CHECKING:
    from bnncli.session.predictor import Predictor


def planned_bytes(predictor: Predictor, choice: IntegratorChoice, split: Split, *, keep_samples: bool) -> int | None:
    """Bytes that the predictions of a split take beside what the process has; None of a last layer, whose features are streamed.

    Raises:
        DeviceError: there is no room for them.
        Untrusted, MissingInput, DataError: the network cannot be opened.
    """
    layers = predictor.header.meta.get("layers")
    if layers is None:
        return None
    from bnncli.session.prediction_memory import PosteriorMemory, PredictionSizes, require_prediction

    reader, count = predictor.train.reader, len(split.content.features)
    asked = PredictionSizes(choice.integrator.needs, count, choice.samples, keep_samples)
    with reader.recorded.visible():
        memory = PosteriorMemory.of(predictor.header, reader.layout(split, str(layers)))
        what = f"predicting {count:,} examples with {predictor.path.stem} ({choice.variant})"
        return require_prediction(memory, asked, predictor.run.device, what=what)
