"""Options are meant by their fields below the stages, and spelled by whoever talks to a person."""

from __future__ import annotations

from bnncli.options.declaration import spelled

MEANT = {"hint": "use a larger \0prior_precision\0", "texts": ["add \0assert_\0", 3], "n": None}


def test_a_field_is_spelled_as_an_option() -> None:
    assert spelled(MEANT) == {"hint": "use a larger --prior-precision", "texts": ["add --assert", 3], "n": None}


def test_a_field_is_spelled_as_whoever_reads_it_writes_it() -> None:
    assert spelled(MEANT, "{}=".format) == {
        "hint": "use a larger prior_precision=",
        "texts": ["add assert_=", 3],
        "n": None,
    }
