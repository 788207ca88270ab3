"""What refine starts from: the splits, the file of the base and the layers that it is over, and the prior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.errors import DataError, UsageError
from bnncli.options.refine import BASE, RefineOptions
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import LAST, ModuleLayout, recorded_layout
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split, posterior_prior, posterior_source
from bnncli.session.network_splits import network_sources
from bnncli.session.out_of_fold import fit_on, held_out_of, load_fitted, require_features, unique_sources
from bnncli.session.posteriors import span_of
from bnncli.session.predictions import find_base
from bnncli.session.run import Run
from bnncli.session.val_report import labeled_val


@dataclass(frozen=True)
class StartInputs:
    """What was given to refine.

    Attributes:
        options: those asked for, with the layers of the base.
        train: the labelled split to train on.
        val: the labelled split to judge by, if there is one.
        base_path: the base's file; None where the base is the prior.
        header: of that file, or of the one whose prior it is.
        span: the row space that the base was fitted in, if any.
        sources: of the splits, the base and the network.
    """

    options: RefineOptions
    train: Split
    val: Split | None
    base_path: Path | None
    header: Header | None
    span: HeadLayout | None
    sources: tuple[Source, ...]

    @property
    def base_name(self) -> str:
        """The base's posterior, or prior."""
        return self.base_path.stem if self.base_path else "prior"

    def layout(self, run: Run) -> HeadLayout | ModuleLayout:
        """Of all of theta. Raises MissingInput where other layers than the last are known of no Gaussian."""
        if self.options.is_last_layer:
            return self.train.layout
        return recorded_layout((self.header or read_header(find_base(run, self.options, None))).meta)


def open_inputs(run: Run, options: RefineOptions) -> StartInputs:
    """The inputs of a run. Raises BnnError where one is missing, or does not fit what is asked for."""
    require_features(run)
    base_path, header, span, of_base = None, None, None, []
    if options.base != "prior":
        base_path = find_base(run, options, None if options.base == BASE else options.base)
        header, source = posterior_source(run, base_path, "base")
        _check_is_gaussian(run, base_path, header)
        options = _with_layers_of(options, header)
        span = span_of(header.meta)
        of_base = [source]
    elif options.prior_precision is None and run.folder.posterior(options.default_base).is_file():
        header = read_header(run.folder.posterior(options.default_base))
    train = load_fitted(run, fit_on(header))
    val = held_out_of(train, labeled_val(run))
    sources = [*unique_sources(train, val), *of_base]
    options.check_trust()
    if not options.is_last_layer:
        sources += network_sources([split for split in (train, val) if split is not None])
    return StartInputs(options, train, val, base_path, header, span, tuple(sources))


def _with_layers_of(options: RefineOptions, header: Header) -> RefineOptions:
    """The options with the layers that the base is over. Raises UsageError where others were asked for."""
    layers = str(header.meta.get("layers", LAST))
    if not options.is_last_layer and layers != options.layers:
        raise UsageError(
            f"--layers {options.layers}: the base {header.path} is over --layers {layers}; omit --layers to "
            "refine it unchanged"
        )
    return replace(options, layers=layers)


def prior_of(run: Run, options: RefineOptions, base_path: Path | None, sources: list[Source]) -> Prior:
    """The target's prior: as given, or the base's; with --base prior, that of the run's laplace."""
    if options.given_precision is not None:
        return Prior(options.given_precision)
    path = base_path
    if path is None:
        path = run.folder.posterior(options.default_base)
        if not path.is_file():
            raise UsageError("--base prior: give --prior-precision NUMBER, or run fit-laplace first")
        sources.append(posterior_source(run, path, "prior_precision")[1])
    return posterior_prior(path, read_header(path))


def _check_is_gaussian(run: Run, path: Path, header: Header) -> None:
    kind = "samples" if header.kind == "samples" else header.meta.get("type")
    if kind != "gaussian":
        layers = header.meta.get("layers", LAST)
        also = {} if layers == LAST else {"layers": layers, "trust_code": True}
        raise DataError(
            f"--base: expected a gaussian posterior; {path} has type {kind}",
            code="wrong_type",
            hint=run.suggest("fit-laplace", **also),
            path=path,
        )
    if "num_varying" in header.meta:
        raise UsageError(
            f"--base: {path.stem} fixes all but {header.meta['num_varying']:,} parameters, but a flow moves all "
            "of them; use a base that fixes none",
            hint=run.suggest("fit-laplace", layers=header.meta["layers"], trust_code=True),
        )
