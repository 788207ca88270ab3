"""Step *smoke*: versions, then the six commands of the pipeline on LeNet-5 and ResNet-20, each in a process, GPU against CPU.

Both devices run the same lines in folders of their own, at the same time: seconds are with the CPU's runs beside. Closed forms
under one prior must be equal to rounding; what is trained or drawn differs by Monte Carlo error, and scores are compared.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_steps.bench import Bench
from gpu_steps.commands import flags
from gpu_steps.lines import command_of, run_line, takes_device

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.demo import fixture_path

CLOSED = ("probit", "mean-field", "bridge")
FEATURES = 1e-5  # of the largest feature
PROBABILITIES = 1e-5
NLL, ACCURACY = 0.005, 0.004  # nats per example, and a share: what two runs of 1,000 draws differ by at most
CPU_THREADS = 4


@dataclass(frozen=True)
class Network:
    """A checkpoint and the lines of its run."""

    name: str
    checkpoint: Path
    extract: str
    epochs: int = 20
    chains: str = ""  # options of hmc

    def lines(self) -> list[str]:
        """The card's six commands; and one Gaussian under a prior that is the same on both devices."""
        closed = " ".join(f"--integrator {name}" for name in CLOSED)
        return [
            f"extract-features FOLDER/run {self.extract}",
            "fit-laplace FOLDER/run",
            f"refine FOLDER/run --flow radial --length 5 --epochs {self.epochs}",
            f"hmc FOLDER/run {self.chains}",
            "fit-laplace FOLDER/run --prior-precision 300 --name fixed",
            "predict FOLDER/run",
            f"predict FOLDER/run --posterior fixed {closed}",
            "evaluate FOLDER/run --bootstrap 100",
        ]


def run(bench: Bench) -> None:
    """Note the versions, then run and compare each network."""
    for name, value in flags(bench.gpu).items():
        bench.ledger.note(name, str(value))
    networks = _networks(bench)
    with ThreadPoolExecutor(len(networks)) as pool:
        references = {} if bench.gpu.is_pretend else {
            network.name: pool.submit(_run_lines, bench, network, "cpu", "reference") for network in networks
        }  # fmt: skip
        made: dict[str, Finished] = {}
        for network in networks:
            work = partial(_run_lines, bench, network, bench.gpu.name, "made")
            bench.ledger.item(
                f"{network.name} on the GPU", lambda name=network.name, work=work: made.update({name: work()})
            )
        for network in [network for network in networks if network.name in made]:
            bench.ledger.item(
                f"{network.name} on GPU and CPU",
                _compare,
                bench,
                network,
                made[network.name],
                references.get(network.name),
            )


def _networks(bench: Bench) -> list[Network]:
    if bench.data is None or bench.checkpoints is None or bench.is_quick:
        data = " ".join(f"--data {split}=npz:{fixture_path(f'{split}.npz')}@300" for split in ("train", "val", "test"))
        extract = f"--model lenet5 {data} --ood mnist=npz:{fixture_path('mnist.npz')}@100"
        return [
            Network(
                "the embedded LeNet-5",
                fixture_path("lenet5-fmnist.pt"),
                extract,
                1,
                "--chains 4 --warmup 10 --draws 20",
            )
        ]
    data = bench.data
    images = f"--data train=npz:{data}/fmnist-train.npz@20000 --data test=npz:{data}/fmnist-test.npz --ood kmnist=npz:{data}/kmnist-test.npz"
    rows = f"--data train=npz:{data}/cifar10.npz:x_train,y_train --data test=npz:{data}/cifar10.npz:x_test,y_test"
    channels = "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225"
    return [
        Network("LeNet-5", bench.checkpoints / "lenet-fmnist-1.pt", f"--model lenet5 {images} --hold-out val=test:2000"),
        Network("ResNet-20", bench.checkpoints / "resnet20-12fca82f.th", f"--model resnet20 {channels} {rows} --hold-out val=test:300"),
    ]  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A network's run on one device: the folder, seconds of each line, and what evaluate printed."""

    folder: Path
    seconds: dict[str, float]
    rows: list[dict[str, Any]]


def _run_lines(bench: Bench, network: Network, device: str, where: str) -> Finished:
    """Run all lines in a new folder. Raises RuntimeError when one fails."""
    folder = bench.folder / f"{network.name}-{where}".replace(" ", "-")
    folder.mkdir()
    shutil.copy(network.checkpoint, folder / "run")
    seconds, document = {}, {}
    for line in network.lines():
        start = time.perf_counter()
        if bench.gpu.is_pretend:
            done = run_line(line, folder, device)
            code, document, errors = done.code, done.document, done.stderr
        else:
            words = [word.replace("FOLDER", str(folder)) for word in line.split()]
            words += ["--device", device] * takes_device(line) + ["--threads", str(CPU_THREADS)] * (
                device == "cpu" and takes_device(line)
            )
            ended = subprocess.run([sys.executable, "-m", "bnncli", *words, "--json", "--progress", "none"],
                                   capture_output=True, text=True, check=False)  # fmt: skip
            code, errors = ended.returncode, ended.stderr
            document = json.loads(ended.stdout) if code == 0 else {}
        if code != 0:
            raise RuntimeError(f"{line}: exit {code}: {errors[-300:]}")
        seconds[_short(line)] = time.perf_counter() - start
    return Finished(folder, seconds, document["rows"])


def _compare(bench: Bench, network: Network, made: Finished, reference: Future[Finished] | None) -> None:
    expected = _run_lines(bench, network, "cpu", "reference") if reference is None else reference.result()
    for line, seconds in made.seconds.items():
        bench.ledger.note(f"{network.name}, {line}", f"{seconds:.1f} s, CPU of {CPU_THREADS} threads {expected.seconds[line]:.1f} s",
                          seconds=seconds, cpu_seconds=expected.seconds[line])  # fmt: skip
    for file in sorted((made.folder / "run.bnn/features").glob("*.h5")):
        one, other = (
            read_features(expected.folder / f"run.bnn/features/{file.name}").features,
            read_features(file).features,
        )
        apart = float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max() / np.abs(one).max())
        bench.ledger.check(f"{network.name}, features of {file.stem}, of the largest", apart, FEATURES)
    for integrator in CLOSED:
        place = f"run.bnn/predictions/fixed.{integrator}/test.h5"
        one, other = (read_predictions(folder / place).probs for folder in (expected.folder, made.folder))
        apart = float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max())
        bench.ledger.check(f"{network.name}, {integrator} probabilities", apart, PROBABILITIES)
    scores = [_scores(finished.rows) for finished in (expected, made)]
    bench.ledger.agree(f"{network.name}, the same rows of scores", scores[0].keys() == scores[1].keys())
    for name, most in (("nll", NLL), ("accuracy", ACCURACY)):
        keys = [key for key in scores[0] if key[-1] == name]
        worst = max(keys, key=lambda key: abs(scores[0][key] - scores[1][key]))
        bench.ledger.check(f"{network.name}, {name} of any posterior and split", abs(scores[0][worst] - scores[1][worst]), most,
                           worst=" ".join(worst[:-1]), cpu=scores[0][worst], gpu=scores[1][worst])  # fmt: skip


def _scores(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], float]:
    """NLL and accuracy by posterior, integrator and split."""
    return {
        (row["posterior"], row["integrator"], row["split"], metric["name"]): float(metric["value"])
        for row in rows for metric in row["metrics"] if metric["name"] in ("nll", "accuracy") and metric["value"] is not None
    }  # fmt: skip


def _short(line: str) -> str:
    words = line.split()
    return command_of(line) if command_of(line) == "extract-features" else " ".join([words[0], *words[2:]])
