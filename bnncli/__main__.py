"""The `bnncli` command: keeps stdout for results, then runs the command line."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from bnncli.system import signals


def main() -> None:
    """Run the command line of this process and exit with its code."""
    signals.install_handlers()  # before the slow imports: an early Ctrl-C is as orderly as a late one
    results = _claim_stdout()
    # Idle OpenMP threads that spin make a busy machine crawl: five times slower with one core taken, measured; a short
    # spin costs nothing on an idle one. Read when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # The same of OpenBLAS's, read when NumPy is imported: 2^18 cycles in place of 2^26, a tenth of a CPU second in every run.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "18")
    # NumPy's products are small, and round alike for any number of cores only by one thread; torch's are where the work is.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Large blocks, which are new pages each time (machine.memory), are asked for in huge ones where the system has them on request:
    # without, a fit of a network took half as long again.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from bnncli.cli.execute import run_command_line
    from bnncli.system.memory import keep_freed_blocks

    keep_freed_blocks()
    code = run_command_line(sys.argv[1:], results)
    try:
        results.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 141
    # Where a signal has left a factorisation behind, the interpreter must not be taken apart under it.
    os._exit(code) if code == 141 or signals.has_abandoned_work() else sys.exit(code)


def _claim_stdout() -> TextIO:
    """A stream on the real stdout; descriptor 1 itself becomes stderr, so that stray prints never reach a pipe."""
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
