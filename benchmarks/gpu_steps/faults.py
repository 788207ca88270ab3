"""Step *faults*: a GPU without free memory, killed replays, two processes on one GPU, a hidden GPU, settings of a user's process.

A command ends well, or with the device's exit code and a hint that works; a killed one goes on to the bits of one that was
left alone. What needs processes of its own is left out on a pretend GPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from gpu_steps.bench import Bench
from gpu_steps.cases import cases, small_case
from gpu_steps.device import Gpu
from gpu_steps.ledger import Ledger
from gpu_steps.lines import Done, command_of, copied, run_line, start_line, takes_device

import bnncli
from bnncli import registry
from bnncli.artifacts.resume import find_leftovers, state_path
from bnncli.commands.demo import fixture_path
from bnncli.errors import Exit

MIB = 1 << 20
WITHOUT_RUN = ("extract-features", "integrals", "demo")
NEXT_TO_NOTHING = MIB  # bytes
FAILS = ("fit-laplace", "refine", "hmc", "predict", "fit-lbbnn", "extract-features")  # of which a real failure is due

# On the embedded network's 850 parameters: lines that need more than is free, and bytes with which something smaller goes.
SCARCE = (
    ("fit-laplace FOLDER/run --prior-precision 100 --structure full --name big", 64 * MIB),
    ("refine FOLDER/run --epochs 20 --elbo-draws 32 --name big", 20 * MIB),
    ("hmc FOLDER/run --chains 1000 --warmup 2 --draws 4 --name big", 64 * MIB),
    ("predict FOLDER/run --posterior laplace --integrator mc --samples 30000 --split test", 64 * MIB),
    ("fit-lbbnn FOLDER/run --slab-sd 1 --repeats 1000 --epochs 1 --name big", 64 * MIB),
)

# What "a smaller --batch-size" and its like are tried with.
LEAST = {
    "structure": "diag", "chains": "1", "repeats": "1", "batch-size": "8", "samples": "10", "grid-size": "5",
    "rank": "2", "num-draws": "1", "elbo-draws": "8", "slab-sd": "1",
}  # fmt: skip

SECONDS = 60.0  # a process
SAVES = 2  # of a resume state, after which the command is killed
EVERY = "0.2"  # seconds between them
ONE_THREAD = ("--threads", "1")  # so that all processes round alike on the CPU

# Fits of seconds on a GPU, nearly all of them in replays, by the name of what they make.
LONG = {
    "refine": "refine FOLDER/run --patience 0 --elbo-draws 8 --epochs 4000",
    "hmc": "hmc FOLDER/run --chains 4 --warmup 100 --draws 1500",
    "lbbnn": "fit-lbbnn FOLDER/run --slab-sd 1 --repeats 4 --epochs 500",
}


def run(bench: Bench) -> None:
    """Settings and names of devices first, then processes side by side, then every command with little memory free."""
    gpu, ledger, folder = bench.gpu, bench.ledger, bench.folder
    is_quick = bench.is_quick or gpu.is_pretend
    small, images = small_case(), next(case for case in cases() if case.name == "images")
    small.prepare(folder / "small")
    for line in small.lines:
        run_line(line, folder / "small", gpu.name)
    ledger.item("a device that is not there", _check_absent, gpu, ledger, folder / "small")
    embedded = folder / "images"
    images.prepare(embedded)
    prepared = [run_line(line, embedded, gpu.name) for line in images.lines[:2]]
    if ledger.agree("features and Gaussian of the embedded network", not any(done.code for done in prepared)):
        ledger.item("a user's TF32", _check_users_precision, gpu, ledger, embedded)
    if gpu.is_pretend:
        ledger.note("killed replays, two processes, CUDA_VISIBLE_DEVICES", "left out: processes know no pretend GPU")
    else:
        ledger.item("processes", check_processes, ledger, embedded, gpu.name)
    for line, leave in SCARCE[:1] if is_quick else SCARCE:
        ledger.item(f"out of memory, embedded network: {command_of(line)}", _check_scarce, gpu, ledger, line, embedded,
                    (NEXT_TO_NOTHING, leave))  # fmt: skip
    ledger.item("out of memory, embedded network: extract-features", _check_scarce, gpu, ledger, images.lines[0], embedded,
                (NEXT_TO_NOTHING,))  # fmt: skip
    for line in _one_of_each([line for line in small.lines if takes_device(line)]):
        ledger.item(f"out of memory, small head: {command_of(line)}", _check_scarce, gpu, ledger, line, folder / "small",
                    (NEXT_TO_NOTHING,))  # fmt: skip


# Little memory.


def _one_of_each(lines: list[str]) -> list[str]:
    """The first line of each command that computes with what the run holds."""
    firsts = {command_of(line): line for line in reversed(lines)}
    return [line for line in lines if firsts[command_of(line)] == line and command_of(line) not in WITHOUT_RUN]


def _check_scarce(gpu: Gpu, ledger: Ledger, line: str, run: Path, amounts: tuple[int, ...]) -> None:
    """With little memory it ends well, or with the device's exit code, a hint that works, and all files as they were."""
    name = command_of(line)
    for leave in amounts:
        what = f"{run.name}: {name}, {leave // MIB} MiB free"
        with copied(run) as copy:
            before = _contents(copy)
            with gpu.ballast(leave):
                starved = run_line(line, copy, gpu.name, *_forced(line))
            ledger.agree(f"{what}: done, or exit {Exit.DEVICE:d} with one clear line and a hint", *_is_clear(starved))
            if starved.code == Exit.OK:
                if name in FAILS and leave == NEXT_TO_NOTHING and run.name == "images":
                    ledger.note(f"{what}: it did not fail", "this amount tries no hint")
                continue
            ledger.agree(f"{what}: all files are as they were", *_is_untouched(before, copy))
            with gpu.ballast(leave):
                _try_hint(gpu, ledger, what, starved, copy)
        with copied(run) as copy:
            after = run_line(_affordable(line), copy, gpu.name, *_forced(line))
            ledger.agree(f"{what}: it works when all memory is free again", after.code == 0, after.failure)


def _forced(line: str) -> list[str]:
    return [] if command_of(line) == "diagnose" else ["--force"]


def _affordable(line: str) -> str:
    """The line with fewer chains, draws and networks: that it works again is to be seen, and not how long it takes."""
    for flag, value in (("chains", "16"), ("samples", "1000"), ("repeats", "16")):
        if f"--{flag} " in line:
            line = with_option(line, flag, value)
    return line


def _is_clear(done: Done) -> tuple[bool, str]:
    """Whether a command went on with less memory, or said so that it cannot, as an error of the device."""
    error = done.document.get("error") or {}
    message, hint = str(error.get("message", "")), str(error.get("hint") or "")
    is_error = done.code == Exit.DEVICE and bool(hint) and "\n" not in message + hint and "Traceback" not in done.stderr
    return done.code == Exit.OK or is_error, done.failure


def _contents(folder: Path) -> dict[Path, str]:
    """The digest of every file's bytes, by its path within the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _is_untouched(before: dict[Path, str], folder: Path) -> tuple[bool, str]:
    """Whether no file is gone, changed or new; locks and states to resume from may be new."""
    after, own = _contents(folder), {path.relative_to(folder) for path in find_leftovers(folder)}
    changed = [f"{path} is changed" for path in before if path in after and after[path] != before[path]]
    gone = [f"{path} is gone" for path in before if path not in after]
    new = [f"{path} is new" for path in after if path not in before and path not in own and ".locks" not in path.parts]
    return not changed + gone + new, "; ".join(changed + gone + new)[:300]


def _try_hint(gpu: Gpu, ledger: Ledger, what: str, starved: Done, copy: Path) -> None:
    """Apply what the hint names, one after the other, under the same ballast, until something ends well."""
    hint = str((starved.document.get("error") or {}).get("hint") or "")
    tried: list[str] = []
    for remedy, lines in remedies(starved.line, hint, gpu.name):
        done = [run_line(line, copy, device, *_forced(line)) for line, device in lines]
        failed = [one for one in done if one.code != Exit.OK]
        if not failed:
            ledger.agree(f"{what}: the hint {hint!r} works ({remedy})", True)
            return
        tried.append(f"{remedy}: {_said(failed[0])}")
    if tried:
        ledger.agree(f"{what}: the hint {hint!r} works", False, "; ".join(tried))
        return
    on_cpu = run_line(_affordable(starved.line), copy, "cpu", *_forced(starved.line))
    ledger.note(f"{what}: the hint {hint!r} names no option with a value to try", f"--device cpu: exit {on_cpu.code}")


def _said(done: Done) -> str:
    """The exit code, and the message and the hint of the error."""
    error = done.document.get("error") or {}
    return f"exit {done.code}: {error.get('message')} ({error.get('hint')})"[:250] if error else done.failure


def remedies(line: str, hint: str, device: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What a hint says to do: in words, and as lines to run, each with its device."""
    for found in re.finditer(r"--([a-z][a-z-]*)(?:, at most)?(?: ([a-z0-9-]+))?", hint):
        flag, value = found[1], found[2] or ""
        if flag == "device":
            yield "--device cpu", [(_affordable(line), "cpu")]
            continue
        is_told = value.isdecimal() or value in (*registry.names("curvature"), *registry.names("flows"))
        if not is_told and flag not in LEAST:
            continue  # such as fewer --posterior at a time
        value = value if is_told else LEAST[flag]
        if "fitted with fit-laplace" in hint and command_of(line) == "refine":
            base = f"fit-laplace FOLDER/run --prior-precision 100 --{flag} {value} --name smaller"
            for place in (device, "cpu"):  # it may take more to make than to refine
                yield (
                    f"a base by --{flag} {value}, made on {place}",
                    [(base, place), (f"{line} --base smaller", device)],
                )
        else:
            yield f"--{flag} {value}", [(with_option(line, flag, value), device)]


def with_option(line: str, flag: str, value: str) -> str:
    """The line with this value of an option, in place of one that it has."""
    return re.sub(rf" --{flag} \S+", "", line) + f" --{flag} {value}"


# Names of devices, and what a user's process has set.


def _check_absent(gpu: Gpu, ledger: Ledger, run: Path) -> None:
    """A GPU beyond the last one."""
    absent = f"cuda:{max(7, torch.cuda.device_count())}"
    done = run_line("fit-temperature FOLDER/run", run, absent, "--force")
    is_error = done.code == Exit.DEVICE and _is_clear(done)[0]
    ledger.agree(f"--device {absent}: exit {Exit.DEVICE:d} with one clear line and a hint", is_error, done.failure)


def _check_users_precision(gpu: Gpu, ledger: Ledger, run: Path) -> None:
    """Python calls of a process that allows TF32 are float32 all the same, and leave it what it has set."""
    with np.load(_validation_images()) as arrays:
        images = arrays["x"][:64]
    kept = _precision()
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("medium")
        users = _precision()
        opened = bnncli.open(run / "run", device=gpu.name, model="lenet5")
        features = opened.features(images)
        probs = opened.predict(features, posterior="laplace", integrator="probit").probs
        ledger.agree(
            "a user's settings of TF32 are as they were", _precision() == users, f"{users}, then {_precision()}"
        )
    finally:
        torch.set_float32_matmul_precision(kept[0])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept[1:]
    reference = bnncli.open(run / "run", device="cpu", model="lenet5")
    exact = reference.features(images)
    expected = reference.predict(features, posterior="laplace", integrator="probit").probs
    apart = float(np.abs(features - exact).max() / np.abs(exact).max())
    ledger.check("error of features in a process that allows TF32, of the largest", apart, 1e-5)
    ledger.check("error of probabilities in a process that allows TF32", float(np.abs(probs - expected).max()), 1e-5)


def _validation_images() -> Path:
    """The embedded images of the val split."""
    return Path(fixture_path("val.npz"))


def _precision() -> tuple[str, bool, bool]:
    """What torch allows in float32 products and convolutions."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )


# Processes.


def check_processes(ledger: Ledger, run: Path, device: str, *, num_at_once: int = 16) -> None:
    """Killed fits, two processes at once and hidden GPUs, side by side; one hmc alone before.

    Args:
        device: cuda:N; cpu to try the script.
    """
    alone = {"hmc": _run_apart(LONG["hmc"], run, "hmc-alone", device)}
    with ThreadPoolExecutor(num_at_once) as pool:

        def begin(work: Callable[..., Done], *words: object) -> Callable[[], Done]:
            return pool.submit(work, *words).result

        kills = {
            (name, kind): begin(_killed, line, name, run, kind, device)
            for name, line in LONG.items()
            for kind in (signal.SIGTERM, signal.SIGKILL)
        }
        whole = {name: begin(_run_apart, LONG[name], run, f"{name}-whole", device) for name in ("refine", "lbbnn")}
        twins = [begin(_run_apart, LONG["hmc"], run, f"hmc-twin-{number}", device) for number in range(2)]
        hidden = {
            what: begin(_run_hidden, run, f"hidden-{number}", asked, visible)
            for number, (what, asked, visible) in enumerate(_visibilities(device))
        }
        alone |= {name: result() for name, result in whole.items()}
        for name, done in alone.items():
            ledger.agree(f"{name} uninterrupted: exit 0", done.code == 0, done.failure)
            ledger.note(f"{name} uninterrupted: seconds", f"{done.seconds:.1f}")
        for (name, kind), result in kills.items():
            ledger.item(f"processes: killed {name}", _judge_killed, ledger, name, kind, result, alone[name])
        ledger.item("processes: two at once", _judge_twins, ledger, alone["hmc"], twins)
        for what, result in hidden.items():
            ledger.item(f"processes: {what}", _judge_hidden, ledger, what, result)


def _apart(run: Path, name: str) -> Path:
    """A copy of the run for one process."""
    copy = run.with_name(f"{run.name}-{name}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    return copy


def _run_apart(line: str, run: Path, name: str, device: str) -> Done:
    return start_line(line, _apart(run, name), device, *ONE_THREAD).wait(SECONDS)


class KilledError(Exception):
    """A command that could not be killed where it should have been, or did not end as it should."""


def _killed(line: str, name: str, run: Path, kind: signal.Signals, device: str) -> Done:
    """Kill the fit once it has saved its state a few times, then go on: what it gives back in the end."""
    folder = _apart(run, f"{name}-{kind.name}")
    started = start_line(line, folder, device, *ONE_THREAD, "--save-every", EVERY)
    state, saves, last, end = state_path(folder / "run.bnn" / "posteriors" / name), 0, 0, time.monotonic() + SECONDS
    while saves < SAVES and started.process.poll() is None and time.monotonic() < end:
        if state.exists() and (changed := _changed_at(state)) != last:
            saves, last = saves + 1, changed
        time.sleep(0.005)
    if started.process.poll() is not None:
        done = started.wait(SECONDS)
        raise KilledError(
            f"it ended after {done.seconds:.1f} s, before it could be killed ({saves} states): {done.failure}"
        )
    started.process.send_signal(kind)
    done = started.wait(SECONDS)
    expected = 128 + kind if kind == signal.SIGTERM else -kind
    if done.code != expected:
        raise KilledError(f"expected exit {expected} after {kind.name}; {done.failure}")
    if kind == signal.SIGTERM and "continue with: " not in done.stderr:
        raise KilledError(f"it does not say how to go on: {done.failure}")
    if not state.exists():
        raise KilledError("no state to resume from is left")
    return start_line(line, folder, device, *ONE_THREAD, "--resume").wait(SECONDS)


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # removed since
        return 0


def _judge_killed(ledger: Ledger, name: str, kind: signal.Signals, result: Callable[[], Done], whole: Done) -> None:
    what = f"{name} killed by {kind.name} midway in its replays, then --resume"
    try:
        resumed = result()
    except KilledError as error:
        ledger.miss(what, str(error))
        return
    if not ledger.agree(f"{what}: exit 0", resumed.code == 0, resumed.failure):
        return
    ledger.agree(f"{what}: it resumed", "resuming" in resumed.stderr, resumed.stderr[-300:])
    ledger.note(f"{what}: seconds", f"{resumed.seconds:.1f}; {_resumed_where(resumed)}")
    ledger.agree(f"{what}: the content of an uninterrupted one", *_is_same(whole, resumed))


def _resumed_where(done: Done) -> str:
    found = re.search(r"resuming[^\n]*", done.stderr)
    return found[0] if found else "nothing resumed"


def _is_same(one: Done, other: Done) -> tuple[bool, str]:
    """Whether both made the same content; which files differ, otherwise."""
    if not one.digests or one.code != other.code:
        return False, f"{one.failure}; {other.failure}"
    differ = [
        path for path in sorted({*one.digests, *other.digests}) if one.digests.get(path) != other.digests.get(path)
    ]
    return not differ, f"other content: {', '.join(differ)}"


def _judge_twins(ledger: Ledger, alone: Done, twins: list[Callable[[], Done]]) -> None:
    for number, result in enumerate(twins):
        done = result()
        what = f"two hmc at once on one device, number {number}"
        ledger.agree(f"{what}: exit 0", done.code == 0, done.failure)
        ledger.agree(f"{what}: the content of one alone", *_is_same(alone, done))
        ledger.note(f"{what}: seconds", f"{done.seconds:.1f}, alone {alone.seconds:.1f}")


def _visibilities(device: str) -> list[tuple[str, str, str]]:
    """What is tried: in words, --device, and CUDA_VISIBLE_DEVICES."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    found = [
        ("no visible GPU, --device cuda:0", "cuda:0", ""),
        ("no visible GPU, --device auto", "auto", ""),
    ]
    if device != "cpu":
        found.append(("one visible GPU, --device cuda:0", "cuda:0", first))
    return found


def _run_hidden(run: Path, name: str, asked: str, visible: str) -> Done:
    folder = _apart(run, name)
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    return start_line("fit-temperature FOLDER/run", folder, asked, environment=environment).wait(SECONDS)


def _judge_hidden(ledger: Ledger, what: str, result: Callable[[], Done]) -> None:
    done = result()
    if what == "no visible GPU, --device cuda:0":
        is_error = done.code == Exit.DEVICE and _is_clear(done)[0]
        ledger.agree(f"{what}: exit {Exit.DEVICE:d} with one clear line and a hint", is_error, done.failure)
        message = str((done.document.get("error") or {}).get("message", ""))
        ledger.note(f"{what}: the message", message)
        return
    device = "cpu" if "auto" in what else "cuda:0"
    found = done.document.get("device")
    ledger.agree(f"{what}: done on {device}", done.code == 0 and found == device, f"device {found}, {done.failure}")
