"""The memory and the disk that a refinement takes, known before its data are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bnncli.options.refine import RefineOptions
from bnncli.session.run import Run
from bnncli.stages.refine.inputs import StartInputs
from bnncli.stages.refine.plan import Sizes, require_network_room, require_room

if TYPE_CHECKING:
    from bnncli.session.network_splits import NetworkReader


@dataclass(frozen=True)
class Room:
    """What is found out of it once, when it is first asked for.

    Args:
        options: resolved.
        sizes: of the work.
        given: the inputs.
    """

    run: Run
    options: RefineOptions
    sizes: Sizes
    given: StartInputs

    @cached_property
    def num_layer_params(self) -> int:
        """Numbers in all layers."""
        from bnncli.stages.refine import work

        return work.num_layer_params(self.options, self.sizes.acted)

    @cached_property
    def reader(self) -> NetworkReader | None:
        """Of the network; None for the last layer."""
        from bnncli.session.network_splits import NetworkReader

        return None if self.options.is_last_layer else NetworkReader.of(self.run, self.options)

    @cached_property
    def required(self) -> int | None:
        """Bytes of memory, None where none are told. Raises DeviceError where there is no room."""
        given = self.given
        if not self.options.is_last_layer:
            return require_network_room(
                self.run,
                self.options,
                self.sizes,
                self.reader,
                splits=(given.train, given.val),
                num_layer_params=self.num_layer_params,
                base_bytes=self._base_bytes,
            )
        if given.header is not None:
            require_room(
                self.run,
                self.options,
                self.sizes,
                given.header,
                num_layer_params=self.num_layer_params,
                whole=given.train.layout if given.span else None,
                base_bytes=self._base_bytes,
            )
        return None

    @property
    def _base_bytes(self) -> int:
        return 0 if self.given.base_path is None else self.given.base_path.stat().st_size

    def stored_bytes(self, num_params: int) -> int:
        """Of the posterior's file, for theta of so many numbers."""
        num_stored = num_params * (4 + (self.options.subspace or 0)) + self.num_layer_params
        return self._base_bytes + 8 * num_stored
