"""From inputs to features: by the network and the preprocessing that the run's features record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bnncli import data
from bnncli.data._arrays import ArrayDataset
from bnncli.errors import DataError
from bnncli.opened.arrays import Items, check_finite, described
from bnncli.opened.messages import exits_refused
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.run.recorded_network import RecordedNetwork
from bnncli.system.devices import random_numbers_kept

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = ExtractFeaturesOptions.batch_size  # that of the command by default: sums depend on it


class InputNetwork(RecordedNetwork):
    """The network that the features of a run were made by, for inputs of the caller's."""

    def features(self, inputs: Tensor | Items) -> Tensor:
        """Features (N, D) of inputs (N, ...), or of N texts or images, on the CPU, in the type that the run's are stored in.

        Raises:
            DataError, UsageError: the network cannot take them, or they are not finite.
        """
        split = self.split_of(inputs)
        try:
            with random_numbers_kept(), exits_refused(), self.visible():
                head = self.network.head(split)
                self.check_head(head)
                return self.network.features(split, head, batch_size=BATCH_SIZE, dtype=self.dtype).features
        except DataError as error:
            if error.code != "wrong_inputs":
                raise
            expected = f"features, or inputs of the network {self.network.spec!r}"
            message = f"x: expected {expected}; got {described(inputs)}: {error.message}"
            raise DataError(message, code="wrong_inputs") from error

    def split_of(self, inputs: Tensor | Items) -> data.InputSplit:
        """Inputs (N, ...), or N texts or images, as a split. Raises DataError where the network cannot take them."""
        if isinstance(inputs, Items):
            dataset: ArrayDataset | Items = inputs
            self._check_takes(inputs)
        else:
            check_finite(inputs)
            dataset = ArrayDataset(inputs, None)
        return data.InputSplit("x", dataset, np.arange(len(inputs)), self.preprocess, is_labeled=False)

    def _check_takes(self, inputs: Items) -> None:
        """Pass when the model makes its own inputs of such items. Raises DataError otherwise."""
        transform = self.preprocess.transform
        if transform is None or transform.takes != inputs.items:
            takes = "arrays" if transform is None else transform.takes
            message = f"x: expected features, or {takes} for the network {self.network.spec!r}; got {described(inputs)}"
            raise DataError(message, code="wrong_inputs")
