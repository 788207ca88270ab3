"""The lines of a grid as an array job of SLURM: a task for each part whose lines wait for each other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from bnncli.options.command import CommandLine
from bnncli.stages.grid.plan import Job

MAX_TASKS = 1000  # SLURM's own limit is 1001 unless its administrator says otherwise (MaxArraySize)
_HEAD = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
# {count} lines of {file}. What a task takes is for sbatch to say, as --gpus=1 --time=2:00:00. After a kill submit it again: it goes on.
cd {folder} || exit 66
bnncli() {{ {program} "$@"; }}
declare -A failed
code=0
stopped=
trap 'stopped=143' TERM
run() {{ # number, numbers of those that it waits for, line
    local number=$1 after=$2 one
    shift 2
    [ -z "$stopped" ] || exit "$stopped"
    for one in $after; do
        if [ -n "${{failed[$one]}}" ]; then
            failed[$number]=1
            echo "left out, as line $one failed: $*" >&2
            return
        fi
    done
    "$@" && return
    [ -z "$stopped" ] || exit "$stopped"
    failed[$number]=1
    code=3
    echo "line $number failed: $*" >&2
}}
case "$SLURM_ARRAY_TASK_ID" in"""
_TAIL = """*)
    echo "expected SLURM_ARRAY_TASK_ID from 0 to {last}; got '$SLURM_ARRAY_TASK_ID'" >&2
    exit 2
    ;;
esac
exit $code"""


def script(jobs: list[Job], lines: Mapping[int, CommandLine], file: Path, *, program: list[str]) -> list[str]:
    """The lines of the script; exit 3 of a task says that a line of it failed.

    Args:
        lines: what runs for each job, by its number.
        program: the words that run bnncli.
    """
    parts = chains(jobs)
    num_tasks = min(len(parts), MAX_TASKS)
    words = {
        "name": re.sub(r"[^A-Za-z0-9_.-]", "-", file.stem),
        "last": num_tasks - 1,
        "count": len(jobs),
        "file": re.sub(r"[^ -~]", "?", str(file)),
        "folder": shlex.quote(str(Path.cwd())),
        "program": shlex.join(program),
    }
    found = _HEAD.format(**words).split("\n")
    for task in range(num_tasks):
        found.append(f"{task})")
        for job in (job for part in parts[task::num_tasks] for job in part):
            after = shlex.quote(" ".join(map(str, job.after)))
            found.append(f"    run {job.number} {after} {lines[job.number].pasted()}")
        found.append("    ;;")
    return [*found, *_TAIL.format(**words).split("\n")]


def chains(jobs: list[Job]) -> list[list[Job]]:
    """The lines in parts that do not wait for each other, each in the order of its lines."""
    of = list(range(len(jobs)))

    def first(number: int) -> int:
        while of[number] != number:
            of[number] = of[of[number]]
            number = of[number]
        return number

    for job in jobs:
        for number in job.after:
            one, other = sorted((first(job.number), first(number)))
            of[other] = one
    found: dict[int, list[Job]] = {}
    for job in jobs:
        found.setdefault(first(job.number), []).append(job)
    return list(found.values())
