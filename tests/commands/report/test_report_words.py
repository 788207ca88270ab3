"""What report calls things, and how it says numbers."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest

from bnncli.commands.report.sections import data_table
from bnncli.commands.report.subject import class_name, describe_error, parameter_name, try_find
from bnncli.commands.report.verdict import describe_calibration, join_names
from bnncli.errors import BnnError, DataError, DeviceError, Interrupted, ReadError
from bnncli.figures.pages import (
    Markup,
    Missing,
    TableCell,
    commands,
    element,
    extract_style_classes,
    join_markup,
    paragraph,
)
from bnncli.session.run import Table

HEAD = [{"name": "head.weight", "offset": 0, "shape": [3, 4]}, {"name": "head.bias", "offset": 12, "shape": [3]}]


@pytest.mark.parametrize(
    ("index", "classes", "name"),
    [
        (6, ["cat", "dog", "7"], "dog: weight of feature 2"),
        (11, ["cat", "dog", "7"], "class 7: weight of feature 3"),
        (13, ["cat", "dog", "7"], "dog: bias"),
        (6, ["no", "yes"], "head.weight[1, 2]"),  # outputs that are no classes
        (99, ["cat", "dog", "7"], "parameter 99"),
    ],
)
def test_parameters_of_a_head_have_the_names_of_their_class_and_feature(
    index: int, classes: list[str], name: str
) -> None:
    assert parameter_name({"param_layout": HEAD, "classes": classes}, index) == name


def test_long_names_of_classes_are_cut_and_what_cannot_be_shown_is_written_out() -> None:
    assert class_name(["x" * 90], 0) == "x" * 24 + "..."
    assert [class_name([name], 0) for name in ("'a\n\udcff", "\\" * 30)] == ["'a\\n\\udcff", "\\" * 24 + "..."]
    layout = [{"name": "w\x01", "offset": 0, "shape": [2]}]
    assert parameter_name({"param_layout": layout}, 1) == "w\\x01[1]"


def test_an_error_becomes_a_sentence_with_the_command_that_helps() -> None:
    command = describe_error(DataError("no features", hint="bnncli extract-features c.pt"))
    assert command == Missing("No features.", "bnncli extract-features c.pt")
    assert describe_error(DataError("x.h5 is damaged", hint="add \0force\0")) == Missing(
        "x.h5 is damaged; add --force."
    )


def raising(error: BnnError) -> Callable[[], None]:
    def find() -> None:
        raise error

    return find


@pytest.mark.parametrize("error", [ReadError("I/O error"), DeviceError("no such device"), Interrupted(2, "stopped")])
def test_what_the_machine_or_the_user_did_ends_the_report(error: BnnError) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))):
        try_find(raising(error))


def test_what_is_wrong_with_artifacts_or_has_no_room_is_told_in_its_place() -> None:
    assert try_find(raising(DataError("x.h5 is damaged"))) == Missing("x.h5 is damaged.")
    assert try_find(raising(DeviceError("Too large", code="out_of_memory"))) == Missing("Too large.")
    assert try_find(lambda: 3) == 3


def test_lists_and_differences_in_words() -> None:
    assert [join_names(list("abc"[:n])) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


@pytest.mark.parametrize(
    ("p_values", "told"),
    [
        ((0.03, 0.04, 0.5), "none is significantly miscalibrated."),  # of three together neither is below 0.05
        ((0.01, 0.04, 0.5), "only a is significantly miscalibrated."),
        ((0.01, 0.02, 0.5), "only a and b are significantly miscalibrated."),
    ],
)
def test_calibration_errors_are_more_than_chance_at_one_level_for_all_of_them(
    p_values: tuple[float, ...], told: str
) -> None:
    known = [(name, {"value": 0.1, "floor": 0.02, "p_calibrated": p}) for name, p in zip("abc", p_values, strict=True)]
    text = describe_calibration("test", known)
    assert text.startswith("On test, stated confidence and accuracy differ by 10.0% (a), 10.0% (b) and 10.0% (c) on")
    assert "A calibrated model would differ by 2.0% by chance" in text
    assert told in text


def test_texts_are_escaped_and_markup_is_not() -> None:
    assert paragraph("a<b", element("b", "c&d"), "\n\udcff") == "<p>a&lt;b<b>c&amp;d</b>\\n\\udcff</p>"
    assert element("img", src='"x"', alt="", hidden=True, class_=None) == '<img src="&quot;x&quot;" alt="" hidden>'
    assert isinstance(join_markup("a", Markup("<hr>"), by=", "), Markup)


def test_styles_that_come_again_become_classes() -> None:
    text = Markup(
        '<a style="x: 1"></a><b style="y: 2"></b><c style="x: 1"></c><d style="y: 2"></d><e style="z: 3"></e>'
    )
    found, rules = extract_style_classes(text)
    assert found == '<a class="s0"></a><b class="s1"></b><c class="s0"></c><d class="s1"></d><e style="z: 3"></e>'
    assert rules.splitlines() == [".s0 { x: 1 }", ".s1 { y: 2 }"]


def test_a_text_that_reads_like_a_style_stays_a_text() -> None:
    text = Markup('<p title="a &lt; b">x style="} * { all: unset"</p>' * 2)
    assert extract_style_classes(text) == (text, "")


def test_a_command_is_not_broken_at_the_dashes_of_an_option_and_is_copied_as_it_is() -> None:
    text = commands(["bnncli hmc 'a b.pt' --draws 3", "bnncli predict c"])
    assert "<kbd>--draws</kbd> 3" in text
    assert html.unescape(re.sub("<[^>]*>", "", text)) == "bnncli hmc 'a b.pt' --draws 3\nbnncli predict c\n"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("-2453.30 +- 0.06", TableCell("−2453.30", -2453.3, ["± 0.06"])),
        ("0.0206 (floor 0.0174) [0.0000, 0.0314]", TableCell("0.0206", 0.0206, ["(floor 0.0174)", "[0.0000, 0.0314]"])),
        ("0.0002 +- 0.0001 (p 0.004)", TableCell("0.0002", 0.0002, ["± 0.0001", "(p 0.004)"])),
        ("* 0.8 +- 0.1", TableCell("* 0.8", 0.8, ["± 0.1"])),
        ("-", TableCell("–")),
        ("mc", TableCell("mc")),
    ],
)
def test_cells_of_the_terminal_are_numbers_over_what_belongs_to_them(text: str, cell: TableCell) -> None:
    table = data_table(Table(["posterior", "x"], [["map", text]]), "t", "")
    assert table.rows == [[TableCell("map"), cell]]
