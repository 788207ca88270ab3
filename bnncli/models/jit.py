"""`jit:FILE.pt`: a TorchScript program, scripted or traced; it runs if it calls only PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bnncli.models import Asked
from bnncli.models._graph_file import GraphFile
from bnncli.options.parts import Form
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from torch import Tensor, nn

FORM = Form("jit:FILE.pt", 60, "A TorchScript program.")
EXTRA: str | None = None
TAKES = ("feature_node",)


class ScriptFile(GraphFile):
    """A TorchScript program in a file."""

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """The program as a network. Raises DataError, Untrusted, UsageError: it cannot be run, or has no head."""
        from bnncli.models._graph_head import HeadSearch, outputs_in_order
        from bnncli.models._graph_network import GraphInput, GraphNetwork
        from bnncli.models._script_program import ScriptProgram, read_program

        self.refuse(state)
        path = self.files[0]
        graph = read_program(path)
        search = HeadSearch(str(path), graph.steps(), graph.constant)
        head = search.find(outputs_in_order(graph.outputs, graph.keys), self.feature_node)
        inputs = dict.fromkeys(graph.inputs, GraphInput(None, None))
        return GraphNetwork(ScriptProgram(graph, head.features), inputs, graph.keys, head).eval()


def open_model(place: str, asked: Asked) -> ScriptFile:
    """The program in a file. Raises MissingInput: there is no such file."""
    path = Path(place).expanduser()
    with open_regular(path):
        pass
    return ScriptFile((path,), asked.feature_node)
