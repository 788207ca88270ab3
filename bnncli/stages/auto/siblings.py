"""Which checkpoints beside the run's own are the same network, trained apart, as their weights and val say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bnncli.errors import BnnError, Interrupted
from bnncli.evaluation.excess import score
from bnncli.lazy import no_grad, torch
from bnncli.names import percent
from bnncli.parameters.module import STATE
from bnncli.session.inputs import Split
from bnncli.session.network_splits import NetworkReader
from bnncli.session.run import Run
from bnncli.stages.fit_ensemble.work import open_member, read_theta

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ALIKE = 0.9  # cosine of two last layers: LeNet-5 trained apart -0.06 to 0.02, after 4, 6 and 12 epochs of one seed 0.98 to 0.996
_FAR_OFF = 0.1  # of accuracy on val
_ROWS = 1000  # of val, that say so


class Siblings(NamedTuple):
    """What was looked at.

    Attributes:
        usable: can be members of an ensemble.
        left_out: each with the reason.
    """

    usable: list[Path]
    left_out: list[str]


@no_grad
def usable_siblings(run: Run, paths: list[Path], val: Split, *, trust_code: bool) -> Siblings:
    """Return the siblings that are networks like the run's own, were trained apart from it and from each other, and predict val about as well.

    Raises:
        BnnError: the run's own network, or its inputs, cannot be opened.
    """
    reader = NetworkReader(run, trust_code)
    usable, left_out = [], []
    with reader.recorded.visible():
        seen, first = reader.split(val, STATE), reader.recorded.network
        assert val.content.header is not None
        head_name = f"{reader.network(reader.input_split(val, val.content.header))[1].name}.weight"
        some = slice(None, None, -(-len(seen.inputs) // _ROWS))  # val may be in the order of its classes
        layout, inputs, labels = seen.layout, seen.inputs[some], val.labels(torch.device("cpu"))[some].numpy()

        def looked_at(theta: Tensor) -> tuple[Tensor, float]:
            """The last layer's weights, or all where it has none of its own name, and the accuracy on val."""
            stacked = theta.to(run.device).unsqueeze(0)
            logits = torch.cat([layout.logits(block.to(run.device), stacked)[0] for block in inputs.split(500)])
            probs = layout.likelihood.class_probabilities(logits.double(), dim=1).cpu().numpy()
            head = layout.split(theta).get(head_name, theta).flatten().double()
            return head / head.norm(), score("", probs, labels).accuracy or 0.0

        own, accuracy = looked_at(read_theta(first.module, layout, run.checkpoint_path, run.checkpoint_path))
        heads = {run.checkpoint_path: own}
        for path in paths:
            run.console.poll(f"checking {path}")
            try:
                theta = read_theta(open_member(run, first, path).module, layout, path, run.checkpoint_path)
            except Interrupted:
                raise
            except BnnError as error:
                left_out.append(f"{path.name} ({error.message})")
                continue
            head, theirs = looked_at(theta)
            near = next((other for other, one in heads.items() if float(one @ head) > _MOST_ALIKE), None)
            if near is not None:
                left_out.append(
                    f"{path.name} (its last layer is nearly that of {near.name}; probably the same training run)"
                )
            elif theirs < accuracy - _FAR_OFF:
                left_out.append(f"{path.name} (accuracy on val {percent(theirs)}, here {percent(accuracy)})")
            else:
                usable.append(path)
                heads[path] = head
    return Siblings(usable, left_out)
