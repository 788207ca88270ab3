"""The hmc command: interrupted runs continue to the same bits, --until judges, draws go to disk as they come."""

from __future__ import annotations

import errno
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.streams import before_writes

from bnncli.artifacts import resume
from bnncli.artifacts.samples import read_samples
from bnncli.commands import hmc
from bnncli.commands.hmc import HmcOptions, hmc_warnings
from bnncli.evaluation.convergence import convergence, log_probabilities
from bnncli.evaluation.verdict import bfmi
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.session.produce import ResumableDraws
from bnncli.system import signals

pytestmark = pytest.mark.gpu

SMALL = ("--chains", 4, "--warmup", 10, "--draws", 30, "--prior-precision", "inherit")


def posteriors(run: Path) -> Path:
    return run.with_name("small.bnn") / "posteriors"


def digest_of(done: Any) -> str:
    assert done.code == 0, done.stderr
    return str(done.json["outputs"][0]["content_digest"])


def hidden_files(run: Path) -> list[str]:
    return [path.name for path in posteriors(run).iterdir() if path.name.startswith(".")]


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """stop_after(n): SIGTERM comes during the n-th transition from now."""
    counts = {"left": -1}
    offer = ResumableDraws.offer

    def counted(self: ResumableDraws, tensors: Any, *, is_last: bool = False) -> None:
        offer(self, tensors, is_last=is_last)
        counts["left"] -= not is_last
        if counts["left"] == 0 and not is_last:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ResumableDraws, "offer", counted)
    yield lambda number: counts.update(left=number)
    signals.forget_received()


@pytest.mark.parametrize("stops", [[1], [10], [11, 3, 13], [39]], ids=str)
def test_interrupted_run_continues_exactly(cli: Cli, small_run: Path, stop_after: Any, stops: list[int]) -> None:
    expected = digest_of(cli("hmc", small_run, *SMALL, "--name", "whole", "--json"))
    words = ["hmc", small_run, *SMALL, "--name", "cut"]
    for number in stops:
        stop_after(number)
        done = cli(*words).expect(128 + signal.SIGTERM)
        assert done.stderr.rstrip().endswith(f"hint: continue with: bnncli hmc {small_run} {joined(words[2:])}")
        words = [*words[: 2 + len(SMALL)], "--name", "cut", "--resume"]
    done = cli(*words, "--json")
    assert f"resuming after {sum(stops)} transitions" in done.stderr
    assert digest_of(done) == expected
    assert hidden_files(small_run) == []


def test_coarse_gradients_are_told_recorded_and_continued(cli: Cli, small_run: Path, stop_after: Any) -> None:
    words = ["hmc", small_run, *SMALL, "--gradients", "bfloat16"]
    whole = cli(*words, "--name", "whole", "--json")
    assert re.search(r"acceptance 0\.\d\d with bfloat16 gradients and exact energies, \d+ divergences", whole.stderr)
    assert whole.json["metrics"]["gradients"] == "bfloat16"
    stop_after(13)
    cli(*words, "--name", "cut").expect(128 + signal.SIGTERM)
    assert "other options" in cli("hmc", small_run, *SMALL, "--name", "cut", "--resume").stderr
    assert digest_of(cli(*words, "--name", "cut", "--resume", "--json")) == digest_of(whole)
    cli("hmc", small_run, *SMALL, "--name", "whole").expect(73, "gradients: existing='bfloat16', requested='float32'")


@pytest.mark.long
def test_gradients_of_some_examples_are_told_and_continued(cli: Cli, tmp_path: Path, stop_after: Any) -> None:
    stream = np.random.default_rng(0)
    features, weight = stream.normal(size=(50_000, 20)).astype(np.float32), stream.normal(size=(10, 20))
    labels = (features @ weight.T + stream.gumbel(size=(50_000, 10))).argmax(axis=1)
    arrays = {"features_train": features, "labels_train": labels, "head_weight": weight, "head_bias": np.zeros(10)}
    np.savez(tmp_path / "run.npz", **arrays)
    run = tmp_path / "run"
    cli("extract-features", run, "--from-npz", tmp_path / "run.npz").expect(0)
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    words = ["hmc", run, "--chains", 4, "--warmup", 6, "--draws", 8]
    whole = cli(*words, "--name", "whole", "--json")
    count = whole.json["metrics"]["gradient_examples"]
    assert count < 50_000 / 8
    assert f"with gradients of {count:,} examples and exact energies" in whole.stderr
    control = cli(*words, "--name", "control", "--dynamics", "leapfrog", "--json")
    assert "gradient_examples" not in control.json["metrics"]
    costs = [done.json["metrics"]["cost"]["gradient_passes"] for done in (whole, control)]
    assert costs[0] < costs[1] / 2
    stop_after(9)
    cli(*words, "--name", "cut").expect(128 + signal.SIGTERM)
    assert digest_of(cli(*words, "--name", "cut", "--resume", "--json")) == digest_of(whole)


def test_draws_without_gradients_option_are_fresh(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HmcOptions.params
    with monkeypatch.context() as patch:
        patch.setattr(HmcOptions, "params", lambda self: {k: v for k, v in plain(self).items() if k != "gradients"})
        cli("hmc", small_run, *SMALL, "--name", "old").expect(0)
    done = cli("hmc", small_run, *SMALL, "--name", "old", "--json")
    assert done.json["action"] == "up_to_date"
    assert "gradients" not in done.json["metrics"]  # which are part of the content: the same draws keep their digest
    cli("hmc", small_run, *SMALL, "--name", "old", "--gradients", "tf32").expect(73)


def joined(words: list[Any]) -> str:
    return " ".join([str(word) for word in words] + ([] if "--resume" in words else ["--resume"]))


def test_run_continues_after_a_full_disk(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(range(12, -1, -1))

    def full() -> None:
        if not next(left, 0):
            raise OSError(errno.ENOSPC, "No space left on device")

    words = ("hmc", small_run, *SMALL, "--save-every", 0)
    before_writes(monkeypatch, full)
    done = cli(*words, "--name", "cut").expect(74, ".cut.resume.draws failed: No space left")
    told = f"free space on the file system of {posteriors(small_run)}, then continue with: bnncli hmc {small_run}"
    assert told in done.stderr
    assert done.stderr.count(" --resume") == 1
    assert not (posteriors(small_run) / "cut.nc").exists()
    monkeypatch.undo()
    done = cli(*words, "--name", "cut", "--resume", "--json")
    assert "resuming after 22 transitions" in done.stderr  # 10 of the warm-up, and the 12 draws that are on disk
    assert digest_of(done) == digest_of(cli(*words, "--name", "whole", "--json"))


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (MemoryError(), 69, "error: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 69, "error: the device failed: CUDA out of memory"),
        (RuntimeError("of the writer"), 1, "error: RuntimeError: of the writer"),
        (SystemExit(3), 1, "error: RuntimeError: the record writer stopped with SystemExit(3)"),
    ],
)
def test_whatever_ends_the_writer_of_draws_is_told_once(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int, line: str
) -> None:
    left = iter(range(3, -1, -1))

    def fail_at_the_fourth() -> None:
        if not next(left, 0):
            raise failure

    before_writes(monkeypatch, fail_at_the_fourth)
    monkeypatch.setattr(hmc, "DrawFile", partial(resume.DrawFile, buffer_bytes=1))
    done = cli("hmc", small_run, *SMALL, "--name", "cut")
    assert (done.code, done.stderr.count(line)) == (code, 1), done.stderr
    assert ("Traceback" in done.stderr) == done.stderr.count("in fail_at_the_fourth") == (code == 1)
    assert hidden_files(small_run) == []
    assert "draws" not in [thread.name for thread in threading.enumerate()]


def test_until_continues_where_it_was_stopped(cli: Cli, small_run: Path, stop_after: Any) -> None:
    words = ("hmc", small_run, *SMALL, "--until", "ess>=300", "--name")
    whole = cli(*words, "whole", "--json")
    stop_after(10 + 30 + 20)
    cli(*words, "cut").expect(143)
    again = cli(*words, "cut", "--resume", "--json")
    assert digest_of(again) == digest_of(whole)
    assert again.json["metrics"]["draws"] == whole.json["metrics"]["draws"] > 60


def test_a_closer_whitening_than_the_default_is_announced_with_its_time(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.inference.structure_choice.automatic_structure", lambda *_, **__: "kron")
    monkeypatch.setattr("bnncli.inference.structure_choice.transition_seconds", lambda *_, **__: 60.0)
    monkeypatch.setattr("bnncli.inference.structure_choice.fit_seconds", lambda *_, **__: 300.0)
    done = cli("hmc", small_run, *SMALL, "--name", "close", "--prior-precision", 7)  # no Gaussian of the run has it
    assert "instead of fit-laplace's kron one: computing it should take about 5 minutes" in done.stderr


def test_other_whitening_is_refused(
    cli: Cli, small_run: Path, stop_after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(20)
    cli("hmc", small_run, *SMALL, "--name", "cut").expect(143)
    monkeypatch.setattr(
        "bnncli.inference.structure_choice.whitening_structure", lambda *_, **__: "kron"
    )  # less memory than before
    cli("hmc", small_run, *SMALL, "--name", "cut", "--resume").expect(65, "it was saved with another whitening")


@pytest.mark.parametrize("damage", ["state", "draws", "one bit", "no draws"])
def test_a_damaged_state_is_refused(cli: Cli, small_run: Path, stop_after: Any, damage: str) -> None:
    stop_after(20)
    cli("hmc", small_run, *SMALL, "--name", "cut").expect(143)
    path = posteriors(small_run) / (".cut.resume.safetensors" if damage == "state" else ".cut.resume.draws")
    if damage == "no draws":
        path.unlink()
    elif damage == "one bit":
        content = bytearray(path.read_bytes())
        content[17] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(path.read_bytes()[:-10])
    cli("hmc", small_run, *SMALL, "--name", "cut", "--resume").expect(65, "cannot resume from")


def test_resume_without_a_state_starts_afresh(cli: Cli, small_run: Path) -> None:
    cli("hmc", small_run, *SMALL, "--name", "new", "--resume").expect(0, "nothing to resume")


def test_until_draws_until_the_conditions_hold(cli: Cli, small_run: Path) -> None:
    done = cli("hmc", small_run, *SMALL, "--name", "u", "--until", "rhat<=1.05, ess>=300, ess-tail>=150", "--json")
    metrics = done.json["metrics"]
    assert done.code == 0
    assert metrics["draws"] in range(45, 600, 15)
    draws = read_samples(posteriors(small_run) / "u.nc").head_weight
    assert draws.shape[:2] == (4, metrics["draws"])
    assert metrics["max_rhat"] <= 1.05
    assert metrics["min_ess_bulk"] >= 300
    assert metrics["min_ess_tail"] >= 150
    shorter = convergence(draws[:, :-15].reshape(4, -1, draws[0, 0].size))
    assert shorter.r_hat > 1.05 or shorter.ess_bulk < 300 or shorter.ess_tail < 150  # type: ignore[operator]
    assert "30 draws per chain: R-hat" in done.stderr
    looks = len(range(30, metrics["draws"] + 1, 15))
    assert (metrics["stopped_by"], metrics["until_looks"]) == ("rhat<=1.05, ess>=300, ess-tail>=150", looks)
    said = f"these numbers decided when to stop (--until rhat<=1.05, ess>=300, ess-tail>=150, after {looks} check{'s' * (looks > 1)}), so they are optimistic"
    assert said in " ".join(done.stderr.split())
    again = cli("hmc", small_run, *SMALL, "--name", "u", "--until", "rhat<=1.05, ess>=300, ess-tail>=150", "--json")
    assert again.json["action"] == "up_to_date"
    assert said in " ".join(again.stderr.split())


def test_until_gives_up_at_the_cap_and_publishes_all_the_same(cli: Cli, small_run: Path) -> None:
    words = ("hmc", small_run, *SMALL, "--name", "u", "--until", "ess>=1e6", "--max-draws", 50)
    for _ in range(2):  # the second time it is up to date, with the same verdict
        done = cli(*words, "--json").expect(3)
        assert done.json["error"]["code"] == "until"
        assert "after 50 draws per chain" in done.stderr
        assert (done.json["metrics"]["draws"], done.json["metrics"]["stopped_by"]) == (50, None)
    assert read_samples(posteriors(small_run) / "u.nc").head_weight.shape[1] == 50


@pytest.mark.parametrize(
    "words",
    [
        ["--until", "rhat<1.01"],
        ["--until", "rhat<=1.01", "--chains", "1"],
        ["--max-draws", "500"],
        ["--until", "ess>=400", "--max-draws", "9"],
        ["--until", "ess>=400", "--sampler", "nuts"],
        ["--sampler", "nuts", "--resume"],
    ],
    ids=" ".join,
)
def test_requests_that_mean_nothing_are_usage_errors(cli: Cli, words: list[str]) -> None:
    cli("hmc", "x", *words).expect(2)


def test_predictions_on_held_out_rows_are_judged(cli: Cli, small_run: Path, arrays: dict[str, np.ndarray]) -> None:
    metrics = cli("hmc", small_run, *SMALL, "--name", "h", "--json").json["metrics"]
    content = read_samples(posteriors(small_run) / "h.nc")
    assert content.head_bias is not None
    weight, bias = content.head_weight.astype(np.float64), content.head_bias.astype(np.float64)
    logits = np.einsum("ctkd,nd->ctnk", weight, arrays["features_val"]) + bias[:, :, None]
    every = logits - np.log(np.exp(logits).sum(axis=3, keepdims=True))
    labels = np.broadcast_to(arrays["labels_val"], every.shape[:3])[..., None]
    expected = convergence(np.take_along_axis(every, labels, axis=3)[..., 0])
    # Of 120 draws, two whose float32 logits change places move R-hat by a thousandth (on a GPU).
    assert metrics["heldout_max_rhat"] == pytest.approx(expected.r_hat, abs=3e-3)
    assert metrics["heldout_min_ess_bulk"] == pytest.approx(expected.ess_bulk, rel=1e-2)
    assert metrics["heldout_min_ess_tail"] == pytest.approx(expected.ess_tail, rel=1e-2)


@pytest.mark.parametrize("layout", [HeadLayout(3, 2), HeadLayout(1, 2, has_bias=False)], ids=str)
def test_log_probabilities_are_exact_where_the_label_is_all_but_certain(layout: HeadLayout) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = 8 * torch.randn(2, 9, layout.num_params, generator=generator)
    features = 3 * torch.randn(7, 2, generator=generator)
    labels = torch.randint(layout.num_classes, (7,), generator=generator)
    logits = layout.logits(features.double(), draws.double().flatten(0, 1))
    if layout.num_outputs == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=2)
    own = logits.gather(2, labels.view(1, -1, 1).expand(len(logits), -1, 1))
    expected = -torch.log1p((logits - own).exp().sum(dim=2).sub(1).clamp(min=0)).view(2, 9, 7).numpy()
    got = log_probabilities(draws, features, labels, layout=layout)
    np.testing.assert_allclose(got[expected < -1e-6], expected[expected < -1e-6], rtol=1e-4)
    assert (got < 0).all()
    assert (got > -1e-9).any()


def test_the_lowest_energy_bfmi_is_told_and_warned_about(cli: Cli, small_run: Path) -> None:
    metrics = cli("hmc", small_run, *SMALL, "--name", "e", "--json").json["metrics"]
    energy = read_samples(posteriors(small_run) / "e.nc").stats["energy"]
    assert metrics["min_bfmi"] == pytest.approx(bfmi(energy).min())
    assert hmc_warnings({**metrics, "max_rhat": 1.0, "min_bfmi": 0.31, "divergences": 0}) == []
    assert "lowest E-BFMI 0.29" in hmc_warnings({**metrics, "max_rhat": 1.0, "min_bfmi": 0.29, "divergences": 0})[0]


def test_chains_are_whitened_by_a_fitting_base(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same target either way: draws differ by rounding alone, as long as no acceptance hangs on that."""
    fitted: list[str] = []

    def fit(*given: Any, **named: Any) -> Any:
        fitted.append(named["structure"])
        return fit_gaussian(*given, **named)

    monkeypatch.setattr(hmc, "fit_gaussian", fit)
    words = ("hmc", small_run, "--chains", 4, "--warmup", 4, "--draws", 4, "--json")
    for name, more in {"rough": ("--structure", "kron"), "off": ("--center", "checkpoint")}.items():
        cli("fit-laplace", small_run, *more, "--prior-precision", 3, "--name", name).expect(0)
    cli("fit-laplace", small_run, "--structure", "full", "--prior-precision", 3, "--name", "exact").expect(0)
    digest_of(cli(*words, "--prior-precision", 3, "--name", "none"))
    assert fitted == ["full"]
    for base in ("rough", "off"):
        digest_of(cli(*words, "--base", base, "--name", f"by-{base}"))
    assert fitted == ["full"] * 3
    digest_of(cli(*words, "--base", "exact", "--name", "by-exact"))
    assert fitted == ["full"] * 3
    made, known = (read_samples(posteriors(small_run) / f"{name}.nc") for name in ("none", "by-exact"))
    assert made.head_weight is not None
    assert known.head_weight is not None
    np.testing.assert_allclose(known.head_weight, made.head_weight, atol=1e-3)
    passes = [record["cost"]["gradient_passes"] for record in map(_metrics, (made, known))]
    assert passes[1] < passes[0]


def _metrics(content: Any) -> dict[str, Any]:
    found: dict[str, Any] = content.header.meta["metrics"]
    return found
