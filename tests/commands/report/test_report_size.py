"""report: the page stays below its size whatever there is to show, and says what it leaves out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from problems.command_line import Cli
from problems.pages import check_is_self_contained, check_names, read_page

from bnncli.figures.pages import LEFT_OUT, Markup, Section, join_markup, paragraph, render_fitting_sections


def fit(sizes: Sequence[int], most: int) -> tuple[str, list[str]]:
    """A page of sections a, b, ... of so many letters, of which later ones are less important; and those that are left out."""
    sections = [Section(name, name, [paragraph("x" * size)]) for name, size in zip("abcdef", sizes, strict=False)]

    def page_of(kept: Sequence[Section], ready: dict[str, Markup]) -> bytes:
        return join_markup(*(ready[section.name] for section in kept)).encode()

    found = render_fitting_sections(
        sections,
        importance=lambda section: -ord(section.name),
        page_of=page_of,
        note=lambda gone: paragraph("without ", *(section.name for section in gone)),
        most_bytes=most,
    )
    return found.content.decode(), [section.name for section in found.left_out]


def test_the_least_important_go_first_and_no_more_than_needed() -> None:
    content, gone = fit([100, 100, 3000, 3000, 100], 4200)
    assert gone == ["e", "d"]
    assert "without ed" in content
    assert len(content) <= 4200


def test_of_a_first_section_that_is_too_large_the_last_blocks_go() -> None:
    content, gone = fit([5000, 100], 1000)
    assert gone == ["b"]
    assert len(content) <= 1000
    assert 'id="a"' in content
    assert "x" * 200 not in content
    assert "without ba" in content


@pytest.fixture
def crowded(small_run: Path) -> Path:
    """A run with many posteriors and splits, all of them copies."""
    folder = small_run.with_name("small.bnn")
    for number in range(9):
        shutil.copy(folder / "posteriors/map.safetensors", folder / f"posteriors/map-{number}.safetensors")
        shutil.copytree(folder / "predictions/laplace.mc", folder / f"predictions/laplace.mc-{number}")
    return small_run


@pytest.mark.nightly
def test_crowded_run_has_a_page_below_the_size(cli: Cli, crowded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 60_000
    monkeypatch.setattr("bnncli.commands.report.whole.MOST_BYTES", most)
    done = cli("report", crowded).expect(0)
    path = crowded.with_name("small.bnn") / "report.html"
    assert path.stat().st_size <= most
    assert f"the report is limited to {most:,} bytes: “Most and least certain inputs”" in done.stderr
    page = read_page(path)
    check_is_self_contained(page, path.read_text())
    check_names(page)
    sections = [section.attributes["id"] for section in page.all("section")]
    assert (sections[0], sections[-1]) == ("verdict", LEFT_OUT)
    assert "“Most and least certain inputs”" in page.one(LEFT_OUT).text
    assert [link.attributes["href"] for link in page.all("nav")[0].all("a")] == [f"#{name}" for name in sections]
