"""The `bnncli` command: reserve stdout for results, then run the command line."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from bnncli.system import signals


def main() -> None:
    """Run the command line of this process and exit with its code."""
    signals.install_handlers()  # before the slow imports, so that an early Ctrl-C is handled
    results = _claim_stdout()
    # Spinning OpenMP threads slow down a busy machine: five times with one core taken, measured. A short spin costs
    # nothing on an idle one. Read when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # With one thread, NumPy's products round the same for any number of cores. They are small; the work is in torch.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Large tensors begin at 2 MiB, and freed ones fit the next of their size. Otherwise (glibc before 2.38) each may lie
    # behind the last: a low-rank fit of 200,000 parameters took 1,782 MiB, one run in two, instead of 550.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from bnncli.cli.execute import run_command_line

    code = run_command_line(sys.argv[1:], results)
    try:
        results.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 141
    # A factorisation abandoned after a signal may still be running: skip the interpreter's teardown.
    os._exit(code) if code == 141 or signals.has_abandoned_work() else sys.exit(code)


def _claim_stdout() -> TextIO:
    """Return a stream on the real stdout and redirect descriptor 1 to stderr, so that stray prints never reach a pipe."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed on entry, as in some cron jobs
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    real = os.dup(1)
    os.dup2(2, 1)
    return open(real, "w", encoding="utf-8", errors="surrogateescape", newline="\n")


if __name__ == "__main__":
    main()
