"""Posteriors over other layers than the last in diagnose: the splits as they see them, and what they gain over the last layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.headers import Header
from bnncli.evaluation.layer_gain import LayerGain, layer_gains
from bnncli.evaluation.verdict import POINTS
from bnncli.options.diagnose import DiagnoseOptions
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split
from bnncli.session.out_of_fold import fit_on
from bnncli.session.predictor import TrainData
from bnncli.session.run import Run

if TYPE_CHECKING:
    from bnncli.stages.diagnose.diagnosis import Diagnosis


@dataclass
class SeenSplits:
    """The run's train and val as its posteriors see them: features, which travel to a GPU once, or the network's inputs."""

    run: Run
    options: DiagnoseOptions
    train: Split
    val: Split | None
    _known: dict[tuple[str | None, str], dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def _data(self) -> TrainData:
        return TrainData(self.run, self.options.trust_code)

    def by(self, header: Header) -> dict[str, Any]:
        """`train` (a target), `val` (a split) and `network` as the posterior with this header sees them, read once; and `data`.

        Raises:
            Untrusted, MissingInput, DataError: its network or its inputs cannot be opened.
        """
        layers, wanted = header.meta.get("layers"), fit_on(header)
        if (layers, wanted) not in self._known:
            network = None if layers is None else self._data.reader.network_of(str(layers))
            val = None if self.val is None else self._data.seen_by(header, self.val)
            target = self._data.target(header, Prior(1.0))
            self._known[layers, wanted] = {"train": target, "val": val, "network": network, "data": self._data}
        return self._known[layers, wanted]


def gains_of_layers(diagnoses: list[Diagnosis]) -> list[LayerGain]:
    """Each posterior over other layers against the last layer's of its own method, else the first that is a distribution.

    Which one is chosen does not depend on how well it predicts.
    """
    scored = [one for one in diagnoses if one.losses is not None and one.judged.type not in POINTS]
    last = [one for one in scored if one.judged.layers is None]
    losses, counterparts = {}, {}
    for one in scored:
        if one.judged.layers is None or not last:
            continue
        same = [other for other in last if other.entry["method"] == one.entry["method"]]
        chosen = (same or last)[0]
        assert one.losses is not None
        assert chosen.losses is not None
        losses[one.judged.name] = one.losses
        counterparts[one.judged.name] = chosen.judged.name, chosen.losses
    return layer_gains(losses, counterparts)
