"""Export a calibration map of `score --fit-calibration` as a graph from probabilities to calibrated ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.exports import KIND, write_export
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.commands.export.build import check_parity_of_probs, check_suffix
from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.names import FORMATS
from bnncli.session import revisions as _revisions
from bnncli.session.calibration import KIND as ROLE
from bnncli.session.calibration import convert_to_logits, read_map
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.run import Result, Run
from bnncli.system.memory import bytes_text

if TYPE_CHECKING:
    from bnncli.commands.export import ExportOptions

TAKEN = ("format", "tolerance")  # options that apply to a map
TOLERANCE = 1e-5
_ROWS = 4096  # that the file is checked on


def export_map(run: Run, options: ExportOptions, path: Path) -> Result:
    """Write a map as ONNX or pt2 beside it, or to --out.

    Raises:
        UsageError: an option does not apply. NumericError: the file does not give what `score --calibration` does.
    """
    plain = type(options)()
    for spec in fields(options):
        if spec.name not in TAKEN and getattr(options, spec.name) != getattr(plain, spec.name):
            raise UsageError(f"\0{spec.name}\0 does not apply to a calibration map, which {path} is")
    if options.format == "torch":
        raise UsageError("\0format\0: a calibration map is exported as onnx or pt2")
    check_suffix(run.naming.out, options.format)
    calibration, header = read_map(path)
    target = Path(run.naming.out) if run.naming.out else path.with_suffix(FORMATS[options.format])
    floor, likelihood = float(header.meta["floor"]), calibration.likelihood
    tolerance = options.tolerance if options.tolerance is not None else TOLERANCE

    def compute() -> ComputationOutput:
        from bnncli.export import graphs, steps
        from bnncli.export.parts import HeadParts

        first, link = (steps.logs, steps.softmax) if likelihood.is_exclusive else (steps.log_odds, steps.labels)
        tensors = {**calibration.tensors, "floor": torch.tensor([floor], dtype=torch.float64)}
        entropy = steps.entropy if likelihood.is_exclusive else steps.label_entropy
        module = HeadParts((first, *calibration.steps, link, entropy), tensors).module()
        rows = torch.rand(_ROWS, likelihood.num_classes, generator=run.stream("export/probs")) ** 4
        rows = torch.cat([rows / rows.sum(dim=1, keepdim=True), torch.eye(likelihood.num_classes)])
        write = graphs.export_program if options.format == "pt2" else graphs.export_onnx
        made = write(module, rows[:2], input_name=graphs.INPUTS)
        found = made.run(rows)
        logits = convert_to_logits(rows.numpy(), floor, is_exclusive=likelihood.is_exclusive)
        expected = calibration.probs(torch.from_numpy(logits))
        parity = check_parity_of_probs(found["probs"], expected, tolerance, made.runtime)
        metrics: dict[str, Any] = {"parity": parity, "bytes": len(made.content)}
        meta = {
            "posterior": path.stem,
            "variant": calibration.name,
            "format": options.format,
            "classes": header.meta["classes"],
            "input": {"name": "inputs", "type": "float32", "shape": ["batch", likelihood.num_classes]},
            "outputs": [{"name": "probs"}, {"name": "entropy"}],
            "metrics": metrics,
        }

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_export(target, made.content, meta=meta, provenance=provenance, may_replace=may_replace)

        return ComputationOutput(publish, metrics, _summarize(path, calibration.name, metrics))

    def when_fresh(found: Header) -> ComputationOutput:
        metrics = found.meta["metrics"]
        return ComputationOutput(
            lambda provenance, may_replace: found.content_digest, metrics, _summarize(path, calibration.name, metrics)
        )

    request = Request(
        target,
        KIND,
        "export",
        {"format": options.format, "tolerance": tolerance},
        _revisions.EXPORT,
        [Source(ROLE, path, header.content_digest)],
        None,
        lambda: 1 << 20,
    )
    return produce(run, request, compute, when_fresh=when_fresh)


def _summarize(path: Path, name: str, metrics: dict[str, Any]) -> list[str]:
    parity = metrics["parity"]
    return [
        f"{path.name} ({name}), {bytes_text(metrics['bytes'])}: probabilities -> probs, entropy",
        f"probabilities of {parity['rows']} rows match score to within {parity['max_difference']:.1e} ({parity['runtime']})",
    ]
