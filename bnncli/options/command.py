"""What a command is: a stage's file declares it as COMMAND, a statement that is read without importing the stage."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, make_dataclass
from typing import Any

from bnncli.options.common import CommonOptions, ComputeOptions, LockOptions, RecordOptions, RunOptions, WriteOptions
from bnncli.options.declaration import Checked

COMPUTE = (ComputeOptions, RecordOptions, WriteOptions, LockOptions, RunOptions, CommonOptions)
READ = (RunOptions, CommonOptions)


SECTIONS = ("Start", "Fit", "Use", "Judge", "Files", "Research", "More")  # of the list of commands, in this order


@dataclass(frozen=True)
class Argument:
    """A positional argument; `is_many` takes one or more, `is_optional` none or one, `writes` a file that is written."""

    name: str
    help: str
    is_many: bool = False
    is_optional: bool = False
    writes: bool = False


CKPT = Argument("ckpt", "The checkpoint. Its artifacts are in the run folder CKPT.bnn beside it.")


@dataclass(frozen=True)
class Command:
    """One subcommand, whose stage's `run` does the work.

    Args:
        groups: classes of options; the one that is not shared by commands goes to the stage.
        section: of the list of commands: one of SECTIONS.
        place: within the section, ascending; those of one place stand in the order of their names.
        name: of the stage's file, given by whoever reads the declaration.
    """

    summary: str
    details: str
    groups: tuple[type, ...]
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...] = (CKPT,)
    parent: str = ""
    section: str = SECTIONS[-1]
    place: int = 1000
    name: str = ""

    @property
    def stage(self) -> str:
        """Module name in bnncli.stages."""
        return self.name.replace("-", "_")


def own_options(**specs: Any) -> type[Checked]:
    """A class of options of a command that has few, each made by `option` with a default of its type."""
    found = []
    for name, spec in specs.items():
        is_list = spec.default is MISSING
        found.append((name, list[str] if is_list else str | None if spec.default is None else type(spec.default), spec))
    return make_dataclass("OwnOptions", found, bases=(Checked,), frozen=True)
