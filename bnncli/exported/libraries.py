"""The libraries that formats need and that the package does not bring."""

from __future__ import annotations

from bnncli.models._extra import require


def require_onnx() -> None:
    """Pass where everything is installed that writes and runs ONNX. Raises UsageError with what installs it otherwise."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        require(library, extra="onnx", what="\0format\0 onnx")
