"""laplace-torch and curvlinops beside bnncli: same network, same data, same prior precision, all in memory,
one thread, CPU seconds.

Needs fmnist-train.npz and fmnist-test.npz, lenet-fmnist-1.pt for LeNet-5, and laplace-torch (with curvlinops 3). The MLP
784-50-10 is trained here. Each job is a process of its own. `apart` is the largest difference of a class probability of the linearised
probit predictive, or the relative one of two numbers. Where the two differ, a third table says who is right: on a small network
the logits' covariance under all of the Gauss-Newton matrix, by autograd, in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import theirs as others
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.prior_search import search
from bnncli.integrators.probit import probit_probs
from bnncli.models.architectures.lenet5 import build as lenet5
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget
from network_parts._bench import Bench, LeftOut
from network_parts._forked import Measured, measured
from network_parts._table import Table
from network_parts._training import train

PRECISION = 100.0
ROWS = {"train": 256, "test": 32}
BATCH = 64  # laplace-torch holds the Jacobian of a batch, (64, 10, P)
STRUCTURES = ("kron", "diag")


@dataclass(frozen=True)
class Case:
    """A network with data: inputs (N, ...) and labels (N,), test inputs (M, ...); and the prior's precision."""

    name: str
    module: nn.Module
    inputs: Tensor
    labels: Tensor
    test: Tensor
    num_outputs: int = 10
    precision: float = PRECISION

    def target(self) -> NetworkTarget:
        """Ours."""
        network = ModuleNetwork(self.module)
        layout = ModuleLayout.of(network, num_outputs=self.num_outputs, input_shape=tuple(self.inputs.shape[1:]))
        return NetworkTarget(self.inputs, self.labels, layout, Prior(self.precision))

    def loader(self) -> Any:
        """Theirs: whole batches by index, the fastest loader there is."""
        from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

        data = TensorDataset(self.inputs, self.labels)
        return DataLoader(data, sampler=BatchSampler(SequentialSampler(data), BATCH, drop_last=False), batch_size=None)

    def laplace(self, structure: str, *, subset: str = "all") -> Any:
        """Fitted by laplace-torch with its default backend."""
        from laplace import Laplace

        warnings.simplefilter("ignore")
        fit = Laplace(
            self.module,
            "classification",
            subset_of_weights=subset,
            hessian_structure=structure,
            prior_precision=self.precision,
        )
        fit.fit(self.loader())
        return fit


def run(bench: Bench) -> list[Table]:
    """Seconds and numbers; curvature alone; and who is right where they differ."""
    problem = others.laplace_torch_problem()
    if problem:
        raise LeftOut(f"laplace-torch is {problem}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = _cases(bench)
        return [*(_side_by_side(case) for case in cases), *_curvatures(cases), _dense()]
    finally:
        torch.set_num_threads(threads)


def _cases(bench: Bench) -> list[Case]:
    """The networks, trained."""
    folder = bench.folder("theirs", "").path
    count = {name: bench.rows(rows, 60) for name, rows in ROWS.items()}
    (inputs, labels), (test, _) = (_images(bench.data(f"fmnist-{name}.npz"), count[name]) for name in ("train", "test"))
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 10))
    train(mlp, bench.data("fmnist-train.npz"), bench.rows(20_000), folder / "mlp.pt", epochs=5, weight_decay=5e-4)
    mlp.load_state_dict(torch.load(folder / "mlp.pt"))
    found = [Case("MLP 784-50-10", mlp.eval(), inputs, labels, test)]
    if bench.checkpoint_folder is not None:
        network = lenet5()
        network.load_state_dict(torch.load(bench.checkpoint("lenet-fmnist-1.pt")))
        found.append(Case("LeNet-5", network.eval(), inputs, labels, test))
    return found


def _images(file: Path, rows: int) -> tuple[Tensor, Tensor]:
    with np.load(file) as arrays:
        inputs = torch.from_numpy(arrays["x"][:rows]).float().div_(255).unsqueeze(1)
        return inputs, torch.from_numpy(arrays["y"][:rows].astype(np.int64))


def _side_by_side(case: Case) -> Table:
    """A row a job."""
    columns = {"job": "", "ours s": ".2f", "theirs s": ".2f", "theirs / ours": ".1f", "ours MiB": ".0f", "theirs MiB": ".0f",
               "ours": ".5g", "theirs": ".5g", "apart": ".1e"}  # fmt: skip
    table = Table(f"{case.name}, {len(case.inputs)} rows, prior precision {case.precision:g}", columns)
    for structure in STRUCTURES:
        ours = measured(lambda structure=structure: _fitted(case, structure)[1])
        theirs = measured(lambda structure=structure: float(case.laplace(structure).log_marginal_likelihood()))
        table.rows.append(_row(f"{structure}, fit: log marginal likelihood", ours, theirs))
        ours = measured(lambda structure=structure: _probit(case, _fitted(case, structure)[0]))
        theirs = measured(lambda structure=structure: _their_probit(case, case.laplace(structure)))
        table.rows.append(_row(f"{structure}, fit and probit of {len(case.test)} rows", ours, theirs))
        ours = measured(lambda structure=structure: _our_precision(case, structure))
        theirs = measured(lambda structure=structure: _their_precision(case, structure))
        table.rows.append(_row(f"{structure}, precision by marglik", ours, theirs))
    table.notes.append(
        f"diag, precision by marglik, minimised in closed form: {measured(lambda: _exact_precision(case)).value:.5g}"
    )
    ours, theirs = measured(lambda: _last_layer(case)), measured(lambda: _their_last_layer(case))
    table.rows.append(_row(f"last layer, full, fit and probit of {len(case.test)} rows", ours, theirs))
    return table


def _row(job: str, ours: Measured, theirs: Measured) -> dict[str, Any]:
    row = {"job": job, "ours s": ours.seconds, "theirs s": theirs.seconds, "theirs / ours": theirs.seconds / ours.seconds,
           "ours MiB": ours.mib, "theirs MiB": theirs.mib}  # fmt: skip
    if isinstance(ours.value, float):
        return {**row, "ours": ours.value, "theirs": theirs.value, "apart": abs(ours.value / theirs.value - 1)}
    return {**row, "apart": float((ours.value - theirs.value).abs().max())}


def _fitted(case: Case, structure: str) -> tuple[LaplaceFit, float]:
    """Ours at the network's weights; and what laplace-torch calls its log marginal likelihood, the mode taken to be there."""
    target = case.target()
    fit = fit_gaussian(target, start=target.layout.trained(), structure=structure, center="checkpoint")
    size = target.layout.num_params
    return fit, fit.log_joint + 0.5 * size * float(np.log(2 * np.pi)) + fit.gaussian.covariance.log_det_scale()


def _probit(case: Case, fit: LaplaceFit) -> Tensor:
    return probit_probs(*fit.gaussian.logit_marginals(case.test))


def _their_probit(case: Case, fit: Any) -> Tensor:
    parts = [fit(rows, pred_type="glm", link_approx="probit").detach() for rows in case.test.split(BATCH)]
    return torch.cat(parts)


def _our_precision(case: Case, structure: str) -> float:
    target = case.target()
    common = {"start": target.layout.trained(), "structure": structure, "center": "checkpoint"}
    return search(target, criterion="marglik", generator=torch.Generator(), **common).best


def _their_precision(case: Case, structure: str) -> float:
    fit = case.laplace(structure)
    fit.optimize_prior_precision(method="marglik", pred_type="glm")
    return float(fit.prior_precision)


def _exact_precision(case: Case) -> float:
    """Of the diagonal: minimises lambda |theta|^2 / 2 + sum log(1 + h / lambda) / 2, the rest of the criterion being the same."""
    target = case.target()
    theta = target.layout.trained()
    (diagonal,) = ggn(target, theta, "diag").values()
    square = float(theta.square().sum())

    def criterion(log_precision: float) -> float:
        precision = float(np.exp(log_precision))
        return 0.5 * precision * square + 0.5 * float(torch.log1p(diagonal / precision).sum())

    found = minimize_scalar(criterion, bounds=(-4.0, 12.0), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))


def _last_layer(case: Case) -> Tensor:
    """The full Gauss-Newton matrix at the trained head, as laplace-torch has it, from features made here."""
    head = [module for module in case.module.modules() if isinstance(module, nn.Linear)][-1]
    kept: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        for rows in (*case.inputs.split(BATCH), case.test):
            case.module(rows)
    hook.remove()
    layout = HeadLayout(head.out_features, head.in_features, has_bias=True)
    target = LastLayerTarget(torch.cat(kept[:-1]), case.labels, layout, Prior(case.precision))
    start = layout.join(head.weight.detach(), head.bias.detach()).double()
    fit = fit_gaussian(target, start=start, structure="full", center="checkpoint")
    return probit_probs(*fit.gaussian.logit_marginals(kept[-1]))


def _their_last_layer(case: Case) -> Tensor:
    return _their_probit(case, case.laplace("full", subset="last_layer"))


def _curvatures(cases: list[Case]) -> list[Table]:
    """Kronecker factors alone, by curvlinops itself."""
    if others.curvlinops_problem():
        return []
    table = Table(
        "The curvature alone, CPU seconds",
        {"network": "", "structure": "", "ours": ".2f", "curvlinops, 10 columns": ".2f", "curvlinops, 2 drawn": ".2f"},
    )
    for case in cases:
        for structure, name in (("kron", "KFACLinearOperator"), ("ekfac", "EKFACLinearOperator")):
            ours = measured(lambda case=case, structure=structure: _curvature(case, structure))
            exact = measured(lambda case=case, name=name: _their_curvature(case, name, fisher_type="type-2"))
            drawn = measured(lambda case=case, name=name: _their_curvature(case, name, fisher_type="mc", mc_samples=2))
            table.rows.append({"network": case.name, "structure": structure, "ours": ours.seconds,
                               "curvlinops, 10 columns": exact.seconds, "curvlinops, 2 drawn": drawn.seconds})  # fmt: skip
    table.notes.append(
        "Ours takes two random columns of the likelihood's Hessian root an example where there are more than four outputs."
    )
    return [table]


def _curvature(case: Case, structure: str) -> None:
    target = case.target()
    ggn(target, target.layout.trained(), structure)


def _their_curvature(case: Case, name: str, **words: Any) -> None:
    import curvlinops

    batches = list(zip(case.inputs.split(BATCH), case.labels.split(BATCH), strict=True))
    operator = getattr(curvlinops, name)(
        case.module, nn.CrossEntropyLoss(reduction="sum"), list(case.module.parameters()), batches,
        kfac_approx="expand", separate_weight_and_bias=False, check_deterministic=False, **words,
    )  # fmt: skip
    operator @ torch.zeros(operator.shape[1])


def _dense() -> Table:
    """Errors of both against all of the Gauss-Newton matrix, on networks so small that it can be had."""
    columns = {"network": "", "structure": "", "ours": ".1e", "laplace-torch": ".1e"}
    title = "Who is right: relative error (Frobenius) of the logits' covariance against the full Gauss-Newton matrix's, by autograd"
    table = Table(title, columns)
    for name, make, shape in TINY:
        torch.manual_seed(0)
        module = make().eval()
        inputs, labels = torch.randn(40, *shape), torch.randint(3, (40,))
        case = Case(name, module, inputs, labels, inputs[:10], num_outputs=3, precision=1.0)
        expected = _exact_covariance(case)
        for structure in ("full", *STRUCTURES):
            row: dict[str, Any] = {"network": name, "structure": structure}
            for who, work in (("ours", _our_covariance), ("laplace-torch", _their_covariance)):
                found = measured(lambda work=work, case=case, structure=structure: work(case, structure)).value.double()
                row[who] = float((found - expected).norm() / expected.norm())
            table.rows.append(row)
    return table


TINY: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
    ("MLP 4-5-3", lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    ("conv 2, linear 3", lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)), (1, 5, 5)),
)  # fmt: skip


def _exact_covariance(case: Case) -> Tensor:
    """J (sum_n J_n^T H_n J_n + Lambda)^-1 J^T of the test inputs, (M, K, K), by autograd in float64."""
    params = {name: value.detach().double() for name, value in case.module.named_parameters()}

    def logits(values: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(case.module, values, (x.unsqueeze(0),))[0]
        return out

    def jacobian(x: Tensor) -> Tensor:
        rows = torch.func.jacrev(logits)(params, x)
        return torch.cat([row.flatten(1) for row in rows.values()], dim=1)

    precision = case.precision * torch.eye(sum(value.numel() for value in params.values()), dtype=torch.float64)
    for x in case.inputs.double():
        hessian = torch.func.hessian(lambda f: cross_entropy(f, torch.tensor(0)))(logits(params, x))
        precision += jacobian(x).T @ hessian @ jacobian(x)
    inverse = torch.linalg.inv(precision)
    return torch.stack([jacobian(x) @ inverse @ jacobian(x).T for x in case.test.double()])


def _our_covariance(case: Case, structure: str) -> Tensor:
    return _fitted(case, structure)[0].gaussian.logit_moments(case.test)[1]


def _their_covariance(case: Case, structure: str) -> Tensor:
    return others.logit_moments_by_laplace_torch(case.laplace(structure), case.test)[1]
