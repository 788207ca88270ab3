"""The share of the true inputs that a latent binary network selects."""

from __future__ import annotations

from bnncli.errors import UsageError
from bnncli.evaluation.score_options import ScoreOption
from bnncli.scores import Score


def input_numbers(text: str | None, option: str = "\0true_inputs\0") -> tuple[int, ...]:
    """The inputs of the truth, numbers from 1; none without a text. Raises UsageError, naming the option."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    numbers = tuple(int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < 10)
    if len(numbers) < len(parts) or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise UsageError(f"{option}: expected distinct comma-separated numbers from 1, such as 1,3,7; got {text!r}")
    return numbers


TRUE_INPUTS = ScoreOption(
    text="True inputs, numbered from 1, such as 1,3,7; adds the rates of true and false inclusions. For fit-lbbnn with "
    "one layer and one logit.",
    default=None,
    type=str,
    metavar="N,...",
    check=input_numbers,
    place=1,
)
SCORE = Score(
    title="TPR",
    limits=(0, 1),
    place=33,
    digits=3,
    is_shown=True,
    facts=("threshold",),
    options={"true_inputs": TRUE_INPUTS},
)
