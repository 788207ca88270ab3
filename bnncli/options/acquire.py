"""Options of acquire."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, check_split_name, check_suffix, option
from bnncli.options.layers import trust_code_option

RULES = ("bald", "batchbald", "entropy", "margin", "random")


@dataclass(frozen=True)
class AcquireOptions(Checked):
    """Options of acquire."""

    pool: str = option("pool", "Split to choose from; its labels, if it has any, are not looked at.", metavar="SPLIT")
    batch: int = option(100, "Examples to choose.", minimum=1)
    by: str = option(
        "bald",
        "bald: the mutual information of label and weights; batchbald: of all labels of the batch together, so that no two tell the same; "
        "entropy: of the mean probabilities; margin: between the two most probable classes; random.",
        choices=RULES,
    )
    posterior: str | None = option(
        None,
        "Posterior, by name or file; by default what auto recommends, or laplace where it has recommended nothing.",
        metavar="NAME|FILE",
    )
    integrator: str | None = option(
        None, "How the posterior becomes probabilities; by default as predict takes it.", family="integrators"
    )
    samples: int | None = option(
        None, "Draws of a sampling integrator; by default as predict, for batchbald 100.", minimum=1
    )
    candidates: int = option(
        5000, "Examples with the highest bald that batchbald chooses among; its time grows with them.", minimum=1
    )
    exclude: str | None = option(
        None, "File of ids or names, one a line, that are not chosen: those that have labels already.", metavar="FILE"
    )
    table: str | None = option(
        None, "Write what was chosen as a table, with scores: .csv.", metavar="FILE", writes=True
    )
    trust_code: bool = trust_code_option(is_recorded=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split_name(self.pool, "\0pool\0")
        if self.table is not None:
            check_suffix(self.table, "\0table\0", ("csv",))
