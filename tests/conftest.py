"""What tests share: the command line in-process and as installed, and small runs made once."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

# Before numpy and torch, which read them when they are imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the console script sets it, before torch is imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as cli/spread.py has it for workers: here they are forked later
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))  # all cores, shared

import numpy as np
from problems.arrays import make_arrays
from problems.command_line import SCRIPT, STEPS, Cli, Invocation, extended_run

SLOW = ("long", "nightly", "exhaustive")  # from the fastest


def pytest_configure(config: pytest.Config) -> None:
    """Leave out tests slower than -m names: `-m core` replaces pyproject.toml's `not long`, and `-m long` is not nightly."""
    asked = config.option.markexpr
    slower = SLOW[max((n + 1 for n, mark in enumerate(SLOW) if mark in asked), default=0) :]
    if asked:
        config.option.markexpr = " and ".join([f"({asked})", *(f"not {mark}" for mark in slower)])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other files for `-m core` and `-m libraries`: other releases need not suit the rest of the suite."""
    asked = re.match(r"\((core|libraries)\)", config.option.markexpr)
    if asked is None or not collection_path.name.startswith("test_"):
        return None
    return f"pytest.mark.{asked[1]}" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that `-m gpu` selects where there is no GPU; where there is one, commands use it by default."""
    if not asks_for_gpu(config):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="-m gpu needs a CUDA device"))


def asks_for_gpu(config: pytest.Config) -> bool:
    """Return whether -m names the marker gpu."""
    return re.search(r"\bgpu\b", config.option.markexpr) is not None


@pytest.fixture(scope="session", autouse=True)
def gpu_is_used(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the last test of `-m gpu` if none of them used the GPU that is there."""
    yield
    if asks_for_gpu(request.config) and any(item.get_closest_marker("gpu") for item in request.session.items):
        import torch

        if torch.cuda.is_available() and not torch.cuda.max_memory_allocated():
            pytest.fail("-m gpu: no test used the GPU", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is imported and collected stays: the garbage collector looks at it neither now nor whenever it looks at everything.

    Later it looks seldom: a tenth of the time went there.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file that makes something once for all of them go to one worker, and first; the others by function.

    Those that fork processes that have imported everything (`kills`) share one worker, and the process that they fork.
    """
    from xdist.scheduler import LoadScopeScheduling

    texts = {
        path.relative_to(config.rootpath).as_posix(): path.read_text()
        for path in Path(__file__).parent.rglob("test_*.py")
    }
    sharing = {file for file, text in texts.items() if 'scope="module"' in text}
    forks = ("from kills import", "from problems.workers import")
    forking = {file for file, text in texts.items() if any(one in text for one in forks)}

    class Scheduler(LoadScopeScheduling):
        """Few units of work: each is a message to a worker, at which the other end waits."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file in forking:
                return "kills"
            return file if file in sharing else nodeid.split("[")[0]

        def _assign_work_unit(self, node: Any) -> None:
            """What is done is forgotten: each unit is counted at every test's end."""
            assigned = self.assigned_work[node]
            for scope in [scope for scope, tests in assigned.items() if all(tests.values())]:
                del assigned[scope]
            super()._assign_work_unit(node)

    return Scheduler(config, log)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], scores_are_rough: None) -> Cli:
    """Runs a command in this process: cli("refine", path, "--epochs", 1)."""
    from bnncli.cli.execute import run_command_line

    def run(*words: object) -> Invocation:
        results = io.StringIO()
        code = run_command_line([str(word) for word in words], results)
        return Invocation(code, results.getvalue(), capfd.readouterr().err)

    return run


@pytest.fixture
def installed() -> Cli:
    """Runs the installed console script in a process of its own; keywords go to subprocess.run."""

    def run(*words: object, **keywords: Any) -> Invocation:
        done = subprocess.run(
            [str(SCRIPT), *(str(word) for word in words)], capture_output=True, text=True, timeout=120, **keywords
        )
        return Invocation(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session", autouse=True)
def hangups_end_what_runs() -> None:
    """A suite under nohup, as a CI machine may run it, ignores them, and its children with it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def nobody_waits_for_the_disk() -> Iterator[None]:
    """No test pulls the plug: a process that is killed leaves what the system has taken. faults/ sees the calls themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def files_that_do_not_change_are_checked_once() -> Iterator[None]:
    """Not once a command, as a user's commands do, each in a process of its own: a tenth of the time went there."""
    from bnncli.artifacts.known_files import remember_checks
    from bnncli.cli import execute

    with pytest.MonkeyPatch.context() as patch, remember_checks():
        patch.setattr(execute, "remember_checks", nullcontext)
        yield


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every artifact, made once; its name (there is no checkpoint). Tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("finished")
    np.savez(folder / "features.npz", **make_arrays())
    name = folder / "small"
    first = ("extract-features", name, "--from-npz", folder / "features.npz", "--ood", "far")
    run_all(first, *((command, name, *words) for command, *words in STEPS))
    return name


@pytest.fixture
def small_run(finished_run: Path, tmp_path: Path, scores_are_rough: None) -> Path:
    """A copy of finished_run that a test may change."""
    return extended_run(finished_run, tmp_path, ())


def run_all(*lines: Sequence[object]) -> None:
    """Commands that succeed, in this process, for fixtures of a file or of all of them."""
    from bnncli.cli.execute import run_command_line

    with pytest.MonkeyPatch.context() as patch:
        make_scores_rough(patch)
        for words in lines:
            assert run_command_line([str(word) for word in words], io.StringIO()) == 0, words


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """What --from-npz reads: three overlapping classes, a head, an unlabelled split `far`."""
    return make_arrays()


@pytest.fixture
def pictures_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pages: to draw them takes longer than the rest, and what is looked at is around them."""
    from bnncli.figures import pages

    monkeypatch.setattr(pages, "inline_svg", lambda shown: f"<svg><title>{shown.name}</title></svg>")


def make_scores_rough(patch: pytest.MonkeyPatch) -> None:
    """Few replicates and permutations: less is known of how sure a score is, and the scores are the same.

    And few repeats, of a batch of one alone, of what export says the time of: that was half the time of its tests.
    """
    from bnncli.commands.export import build as export
    from bnncli.evaluation import calibration
    from bnncli.evaluation.distances import compare_draws

    patch.setenv("BNNCLI_EVALUATE_BOOTSTRAP", "20")
    patch.setattr(calibration, "NUM_DRAWS", 200)
    patch.setattr(export, "_SECONDS", 0.0)
    patch.setattr(export, "_MOST_SECONDS", 0.0)
    patch.setitem(compare_draws.__kwdefaults__, "num_permutations", 99)


@pytest.fixture
def scores_are_rough(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of commands that tests run; tests marked `sure_scores` look at how sure they are."""
    if request.node.get_closest_marker("sure_scores") is None:
        make_scores_rough(monkeypatch)
