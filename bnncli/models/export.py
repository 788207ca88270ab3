"""`export:FILE.pt2`: a program of torch.export.save; its graph is read as data; only PyTorch's own operators run
operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bnncli.models import Asked
from bnncli.models._graph_file import GraphFile
from bnncli.options.parts import Form
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

FORM = Form("export:FILE.pt2", 50, "A program saved by torch.export.")
EXTRA: str | None = None
TAKES = ("feature_node",)


class ExportedFile(GraphFile):
    """An exported program in a file."""

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """The program as a network. Raises DataError, Untrusted, UsageError: it cannot be run, or has no head."""
        from bnncli.models._aten_steps import aten_step
        from bnncli.models._export_calls import DTYPES
        from bnncli.models._export_program import ExportedProgram, constants_of, read_graph
        from bnncli.models._graph_head import HeadSearch, outputs_in_order
        from bnncli.models._graph_network import GraphInput, GraphNetwork

        self.refuse(state)
        path = self.files[0]
        graph = read_graph(path)
        find = constants_of(graph)
        steps = [
            aten_step(call.operator, content["name"], call.tensors, name=call.name)
            for call in graph.nodes
            for kind, content in call.outputs[:1]
            if kind == "as_tensor"
        ]

        def constant(name: str) -> np.ndarray | None:
            value = find(name)
            return None if value is None else value.numpy()

        search = HeadSearch(str(path), steps, constant)
        head = search.find(outputs_in_order(graph.outputs, graph.keys), self.feature_node)
        inputs = {
            name: GraphInput(DTYPES[meta["dtype"]], tuple(size.get("as_int") for size in meta["sizes"]))
            for name, meta in graph.inputs.items()
        }
        return GraphNetwork(ExportedProgram(graph, head.features), inputs, graph.keys, head).eval()


def open_model(place: str, asked: Asked) -> ExportedFile:
    """The program in a file. Raises MissingInput: there is no such file."""
    path = Path(place).expanduser()
    with open_regular(path):
        pass
    return ExportedFile((path,), asked.feature_node)
