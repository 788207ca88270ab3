"""A process that leaves no new mark is found by those that look at it, and nobody else is."""

from __future__ import annotations

from bnncli.system.workers import SILENCE, Heartbeats


class Marks(dict[str, str]):
    """A store in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str, default: object = None) -> bytes:  # type: ignore[override]
        return self[key].encode()


def test_the_first_looks_at_all_and_the_others_at_the_first() -> None:
    marks, ended = Marks({f"beat/{rank}": "0" for rank in range(3)}), list[int]()
    first, last = (Heartbeats(marks, rank, 3, ended.append) for rank in (0, 2))
    for now in (0.0, SILENCE - 1):
        assert (first.silent(now), last.silent(now)) == (None, None)
    marks["beat/0"] = marks["beat/1"] = "1"
    assert (first.silent(SILENCE + 1), last.silent(SILENCE + 1)) == (2, None)
    marks["beat/2"] = "1"
    assert first.silent(SILENCE + 2) is None
    assert (first.silent(2 * SILENCE), last.silent(2 * SILENCE + 2)) == (None, 0)
