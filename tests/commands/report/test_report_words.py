"""What report calls things, and how it says numbers."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest

from bnncli.commands.report.sections import data_table
from bnncli.commands.report.subject import class_name, parameter_name, try_find
from bnncli.commands.report.verdict import describe_calibration
from bnncli.errors import BnnError, DataError, DeviceError, Interrupted, ReadError
from bnncli.figures.pages import Markup, Missing, TableCell, commands, extract_style_classes
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
def test_parameters_are_named_after_class_and_feature(index: int, classes: list[str], name: str) -> None:
    assert parameter_name({"param_layout": HEAD, "classes": classes}, index) == name


def test_long_names_of_classes_are_cut_and_what_cannot_be_shown_is_written_out() -> None:
    assert class_name(["x" * 90], 0) == "x" * 24 + "..."
    assert [class_name([name], 0) for name in ("'a\n\udcff", "\\" * 30)] == ["'a\\n\\udcff", "\\" * 24 + "..."]
    layout = [{"name": "w\x01", "offset": 0, "shape": [2]}]
    assert parameter_name({"param_layout": layout}, 1) == "w\\x01[1]"


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


@pytest.mark.parametrize(
    ("p_values", "told"),
    [
        ((0.03, 0.04, 0.5), "none is significantly miscalibrated."),  # of three together neither is below 0.05
        ((0.01, 0.04, 0.5), "only a is significantly miscalibrated."),
        ((0.01, 0.02, 0.5), "only a and b are significantly miscalibrated."),
    ],
)
def test_calibration_errors_are_tested_at_one_joint_level(p_values: tuple[float, ...], told: str) -> None:
    known = [(name, {"value": 0.1, "floor": 0.02, "p_calibrated": p}) for name, p in zip("abc", p_values, strict=True)]
    text = describe_calibration("test", known)
    assert text.startswith("On test, stated confidence and accuracy differ by 10.0% (a), 10.0% (b) and 10.0% (c) on")
    assert "A calibrated model would differ by 2.0% by chance" in text
    assert told in text


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
