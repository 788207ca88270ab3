"""What diagnose of posteriors over a whole network will take of the memory beside its inputs, and the refusal of what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bnncli.artifacts.headers import Header
from bnncli.evaluation.mmd import comparing_bytes, num_compared
from bnncli.evaluation.verdict import DENSITIES, POINTS
from bnncli.inference.elbo import MOST_DRAWS
from bnncli.inference.network_memory import first_use_bytes, judging_bytes
from bnncli.integrators import load_integrator
from bnncli.options.diagnose import DiagnoseOptions
from bnncli.session.inputs import Split
from bnncli.session.prediction_memory import PosteriorMemory, PredictionSizes
from bnncli.session.predictor import sampling_integrator
from bnncli.session.run import Run
from bnncli.stages.diagnose.diagnosis import VAL_DRAWS
from bnncli.stages.diagnose.layers import SeenSplits
from bnncli.system.memory import require
from bnncli.targets.network import pairs_at_once

_LIBRARIES = 135 * 2**20  # what arviz-stats, which fits Pareto k, and all that it imports take, as measured


def require_room(run: Run, options: DiagnoseOptions, headers: Sequence[Header], seen: SeenSplits) -> int | None:
    """Bytes that diagnose takes at its peak beside the inputs, which are read; None without posteriors over a network.

    Draws of each posterior are kept to be compared with those of all others.

    Raises:
        DeviceError: that is too much.
    """
    kept, peak, libraries, sizes = 0, 0, 0, []
    for header in headers:
        if header.meta.get("layers") is None:
            continue  # a last layer's draws are small
        known = seen.by(header)
        memory = PosteriorMemory.of(header, known["train"].layout)
        libraries = _LIBRARIES if _has_weights(memory, header) else libraries
        peak = max(peak, kept + _work(run, options, header, memory, known))
        sizes.append((_num_kept(memory), memory.layout.num_params))
        kept += 4 * _num_kept(memory) * memory.layout.num_params
    if not sizes:
        return None
    comparing = max(comparing_bytes(count, num_params) for count, num_params in sizes) if len(sizes) > 1 else 0
    needed = libraries + first_use_bytes(run.device) + max(peak, kept + comparing)
    hint = "name fewer posteriors with \0posterior\0" if len(sizes) > 1 else "use a posterior over fewer \0layers\0"
    require(needed, run.device, what=f"diagnose of {len(sizes)} posteriors over a network", hint=hint)
    return needed


def _work(run: Run, options: DiagnoseOptions, header: Header, memory: PosteriorMemory, known: dict[str, Any]) -> int:
    """While one posterior is judged."""
    device, val = run.device, known["val"]
    work = [memory.sampling_bytes(_num_kept(memory))]
    if _has_weights(memory, header):
        judging = judging_bytes(memory.layout.num_params, num_draws=options.draws or MOST_DRAWS)
        work.append(judging + memory.pass_bytes(device, pairs_at_once(memory.layout, device)))
    found = [memory.reading_bytes, memory.held_bytes + max(work)]
    if isinstance(val, Split) and val.content.labels is not None:
        name = "plug-in" if memory.kind in POINTS else sampling_integrator(header)
        makes_draws = memory.kind not in (*POINTS, "samples", "linear-draws")
        asked = PredictionSizes(
            load_integrator(name).needs, len(val.content.features), VAL_DRAWS if makes_draws else None
        )
        found.append(memory.predicting_bytes(device, asked, has_scores=False))
    return max(found)


def _has_weights(memory: PosteriorMemory, header: Header) -> bool:
    """Whether a posterior has a density over all parameters, and so importance weights."""
    return memory.kind in DENSITIES and "num_varying" not in header.meta


def _num_kept(memory: PosteriorMemory) -> int:
    """Draws that are compared."""
    count = num_compared(memory.layout.num_params)
    return min(count, memory.num_stored or count)
