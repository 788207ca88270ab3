"""report --model-card: the Hub's own library reads the scores of evaluate from it, and nothing of the user's is lost."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from problems.command_line import Cli
from problems.optional_libraries import library

from bnncli.cli.execute import run_command_line

yaml: Any = library("yaml")
pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("pictures_are_names")]

OWN = """---
# how people find it
license: mit  # as the code
tags: [vision]
pipeline_tag: tabular-regression
model-index:
- name: mine
  results:
  - task: {type: image-classification}
    dataset: {type: other, name: Other}
    metrics:
    - {type: f1, value: 0.5}
released: 2024-05-01
---
# Mine

Before <b>it</b>.

<!-- bnncli: start -->
old numbers
<!-- bnncli: end -->

After it.
"""


@pytest.fixture(scope="module")
def run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; only its page changes."""
    name = tmp_path_factory.mktemp("carded") / "small"
    shutil.copytree(finished_run.with_name("small.bnn"), name.with_name("small.bnn"))
    return name


def write_card(run: Path, card: Path, *words: str) -> str:
    assert run_command_line(["report", str(run), "-q", "--model-card", str(card), *words], io.StringIO()) == 0
    return card.read_bytes().decode()


def scores_of(cli: Cli, run: Path, text: str) -> dict[str, float]:
    """What evaluate says of the posterior that the card is about."""
    focus = text.partition('posterior="')[2].partition('"')[0]
    rows = cli("evaluate", run, "--split", "test", "--json").json["rows"]
    (row,) = [row for row in rows if row["posterior"] == focus]
    return {metric["name"]: metric["value"] for metric in reversed(row["metrics"]) if metric["value"] is not None}


def test_the_library_of_the_hub_reads_the_scores_of_evaluate(cli: Cli, run: Path, tmp_path: Path) -> None:
    hub = library("huggingface_hub")
    text = write_card(run, tmp_path / "README.md")
    data = hub.ModelCard(text).data
    known = scores_of(cli, run, text)
    assert data.model_name == "small"
    assert data.library_name == "bnncli"
    assert {one.metric_type: one.metric_value for one in data.eval_results} == {
        name: known[name] for name in ("accuracy", "nll", "ece")
    }
    assert {(one.dataset_split, one.task_type) for one in data.eval_results} == {("test", "tabular-classification")}
    for row in cli("evaluate", run, "--split", "test", "--json").json["rows"]:
        if row["posterior"] == "map":
            (nll,) = [metric for metric in row["metrics"] if metric["name"] == "nll"]
            ends = nll["interval"]
            assert f"| {nll['value']:.4f} [{ends['low']:.4f}, {ends['high']:.4f}] |" in text


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_what_the_user_wrote_stays(cli: Cli, run: Path, tmp_path: Path, newline: str) -> None:
    hub, card = library("huggingface_hub"), tmp_path / "README.md"
    (tmp_path / "stored.md").write_bytes(OWN.replace("\n", newline).encode())
    card.symlink_to("stored.md")
    text = write_card(run, card)
    assert card.is_symlink()
    assert text.count("\n") == text.count(newline)
    text = text.replace(newline, "\n")
    for line in (
        "# how people find it",
        "license: mit  # as the code",
        "pipeline_tag: tabular-regression",
        "released: 2024-05-01",
    ):
        assert f"\n{line}\n" in text
    assert "---\n# Mine\n\nBefore <b>it</b>.\n\n<!-- bnncli: start -->\n## " in text
    assert text.endswith("<!-- bnncli: end -->\n\nAfter it.\n")
    assert "old numbers" not in text
    data = hub.ModelCard(text).data
    assert data.tags == ["vision", "bnncli", "bayesian", "uncertainty"]
    assert data.model_name == "mine"
    assert {one.metric_type for one in data.eval_results} == {"f1", "accuracy", "nll", "ece"}
    # Again: nothing changes, but for the name of the data, which is the user's from now on.
    named = text.replace("name: test\n", "name: My data\n").replace("type: test\n", "type: my-data\n")
    assert named != text
    card.write_bytes(named.replace("\n", newline).encode())
    done = cli("report", run, "--model-card", card, "--json").expect(0)
    assert done.json["action"] == "up_to_date"
    assert card.read_bytes().decode().replace(newline, "\n") == named


def test_a_text_without_metadata_gets_both(run: Path, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# Mine\n\n---\nno metadata\n---")
    text = write_card(run, card)
    assert "---\n# Mine\n\n---\nno metadata\n---\n\n<!-- bnncli: start -->\n" in text
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "bnncli"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bnncli: start -->\n", "1 start and 0 end comments"),
        ("<!-- bnncli: end --><!-- bnncli: start -->\n", "1 start and 1 end comments"),
        ("---\na: [\n---\n", "its metadata is not valid YAML"),
        ("---\n- a\n---\n", "expected metadata with a model-index"),
        ("---\nmodel-index: 3\n---\n", "expected metadata with a model-index"),
        ("---\n{license: mit}\n---\n", "cannot add to the metadata"),
        ("\udcff", "is not a text in UTF-8"),
    ],
)
def test_a_card_that_cannot_be_kept_is_left_as_it_is(
    cli: Cli, run: Path, tmp_path: Path, text: str, message: str
) -> None:
    card = tmp_path / "README.md"
    content = text.encode(errors="surrogateescape")
    card.write_bytes(content)
    done = cli("report", run, "--model-card", card, "--out", tmp_path / "page.html")
    assert done.code == 65
    assert message in done.stderr
    assert card.read_bytes() == content
    assert not (tmp_path / "page.html").exists()


def test_it_needs_one_checkpoint_another_file_and_pyyaml(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(run.with_name("small.bnn"), tmp_path / "other.bnn").with_suffix("")
    cli("report", run, other, "--model-card", tmp_path / "a.md").expect(2, "--model-card needs one checkpoint; got 2")
    page = tmp_path / "page.html"
    cli("report", run, "--out", page, "--model-card", page).expect(2, "is an input or another output")
    monkeypatch.setitem(sys.modules, "yaml", None)
    done = cli("report", run, "--model-card", tmp_path / "a.md")
    assert "--model-card needs yaml, which is not installed" in done.stderr
    assert "bnncli[hf]" in done.stderr
