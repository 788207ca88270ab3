"""`onnx:FILE`: an ONNX graph, run by onnxruntime, with its external tensor files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bnncli.models import ModelRequest
from bnncli.models.graphs import GraphFile
from bnncli.models.libraries import require
from bnncli.models.onnx_files import onnx_files
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.options.declaration import Form

if TYPE_CHECKING:
    from torch import Tensor, nn

FORM = Form("onnx:FILE", 70, "An ONNX graph, run by onnxruntime.")
EXTRA: str | None = "onnx"
TAKES = ("feature_node",)


class OnnxFile(GraphFile):
    """An ONNX graph in a file."""

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network. Raises DataError or UsageError if it cannot run, has no head, or a library is missing."""
        self.refuse(state)
        for library in ("onnx", "onnxruntime"):
            require(library, extra="onnx")
        from bnncli.models.graphs import GraphNetwork, HeadSearch, outputs_in_order
        from bnncli.models.onnx_program import OnnxGraph, OnnxProgram, keys_of  # it imports onnx

        graph = OnnxGraph(self.files[0])
        keys = keys_of(graph.outputs)
        search = HeadSearch(str(self.files[0]), graph.steps(), graph.constant)
        head = search.find(outputs_in_order(graph.outputs, keys), self.feature_node)
        digest = json_sha256([file_sha256(file) for file in self.files])
        program = OnnxProgram(graph, head.features, digest=digest)
        at = graph.outputs.index(head.tail[-1]) if head.tail else 0
        return GraphNetwork(program, graph.inputs, keys, head, tail=graph.tail(head.tail), tail_at=at).eval()


def open_model(place: str, asked: ModelRequest) -> OnnxFile:
    """Open the graph in a file. Raises MissingInput, DataError or Untrusted as onnx_files does."""
    return OnnxFile(onnx_files(Path(place).expanduser()), asked.feature_node)
