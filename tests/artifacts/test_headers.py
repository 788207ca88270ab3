"""What artifacts say of themselves: strict JSON, known kinds and schemas, provenance that readers can rely on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bnncli.artifacts import provenance as provenance_module
from bnncli.artifacts.files import read_header, read_metrics, write_metrics
from bnncli.artifacts.headers import check_header, parse_json
from bnncli.artifacts.provenance import build_provenance
from bnncli.errors import DataError
from bnncli.numerics import digests
from bnncli.numerics.digests import canonical_json, json_sha256

pytestmark = pytest.mark.core

HERE = Path("here")


def make_provenance(target: Path = HERE, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "command": ["bnncli", "x"], "params": {"a": 1}, "algo_rev": 1, "inputs": [], "checkpoint": None,
        "environment": {"seed": 0}, "seconds": 1.0, "warnings": [],
    }  # fmt: skip
    return build_provenance(target, **{**given, **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ('{"a":NaN}', "not JSON"),
        ('{"a":1e999}', "not JSON"),
        ('{"a":1,"a":2}', "a duplicate key"),
        ('{"b":{"a":1,"a":2}}', "a duplicate key"),
        ("[" * 40 + "]" * 40, "nested too deeply"),
        ("[" * 200_000, "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        ("[" + "1," * (1 << 19) + "1]", "at most 1048576"),
    ],
)
def test_a_header_that_is_not_strict_json_is_refused(text: str | bytes, why: str) -> None:
    with pytest.raises(DataError, match=why):
        parse_json(HERE, text)


@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ("2.0", "future_schema"),
        ("0.9", "old_schema"),
        ("new", "bad_schema"),
        (None, "bad_schema"),
        ("\u00b2", "bad_schema"),
        ("1.\u00b2", "bad_schema"),
        ("9" * 5000, "bad_schema"),
        (1, "bad_schema"),
        ("1.0\n", "bad_schema"),
    ],
)
def test_a_schema_of_another_major_version_is_refused(schema: Any, code: str) -> None:
    with pytest.raises(DataError, match=r"schema") as caught:
        check_header(HERE, "features", schema, "d", make_provenance(), {})
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("log?token=abc123&level=2", "log?token=***&level=2"),
        ("API-KEY=abc", "API-KEY=***"),
        ("https://me:pass@host/x", "https://***@host/x"),
        ("train=npz:tokens.npz", "train=npz:tokens.npz"),
        ("--num-tokens=5", "--num-tokens=5"),
    ],
)
def test_a_recorded_command_has_no_secrets(word: str, kept: str) -> None:
    assert make_provenance(command=["bnncli", word])["command"] == ["bnncli", kept]


def test_a_newer_minor_version_is_read() -> None:
    assert check_header(HERE, "features", "1.7", "d", make_provenance(), {}).schema == "1.7"


@pytest.mark.parametrize("kind", ["resumes", None, ["features"], 3])
def test_an_unknown_kind_is_not_ours(kind: Any) -> None:
    with pytest.raises(DataError, match="not a bnncli artifact"):
        check_header(HERE, kind, "1.0", "d", make_provenance(), {})


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": [{"role": "x"}]}, {"inputs": "x"}, {"inputs": [3]}, {"params_hash": None}, {"params": []},
        {"checkpoint": "x"}, {"checkpoint": {"weights_digest": "x"}}, {"algo_rev": "1"}, {"command": "rm"},
        {"tool": None}, {"tool": "x"}, {"inputs": [{"role": "x", "path": "a\0b", "content_digest": "d"}]}, {"seconds": "x"},
        {"inputs": [{"role": "x", "path": "a" * 20_000, "content_digest": "d"}]}, {"algo_rev": True}, {"warnings": {}}, {"device": None},
    ],
)  # fmt: skip
def test_provenance_that_readers_cannot_rely_on_is_refused(change: dict[str, Any]) -> None:
    check_header(HERE, "features", "1.0", "d", make_provenance(), {})
    with pytest.raises(DataError, match="header is damaged"):
        check_header(HERE, "features", "1.0", "d", {**make_provenance(), **change}, {})


@pytest.mark.parametrize("content", [b"", b"hello there, world", b"\x80\x04K\x01.", b"PK\x03\x04" * 9])
def test_a_foreign_file_is_not_an_artifact(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=r"empty|not a bnncli artifact"):
        read_header(tmp_path / "x")


def test_metrics_are_strict_sorted_json_with_a_newline_and_a_digest(tmp_path: Path) -> None:
    rows = [{"posterior": "map", "metrics": [{"name": "nll", "value": None, "undefined": "no labels"}]}]
    path = tmp_path / "m.json"
    digest = write_metrics(path, rows=rows, predictions=[], provenance=make_provenance(), may_replace=False)
    text = path.read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    assert read_metrics(path).meta["rows"] == rows
    assert read_metrics(path).content_digest == digest
    assert digest == "sha256:" + json_sha256({"predictions": [], "rows": rows})
    path.write_text(text.replace("no labels", "no babels"))
    with pytest.raises(DataError, match="does not match its digest"):
        read_metrics(path)


def test_metrics_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    rows = [{"value": float("nan")}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_metrics(tmp_path / "m", rows=rows, predictions=[], provenance=make_provenance(), may_replace=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_name_that_is_not_utf8_survives_in_json() -> None:
    name = "a\udcffé"
    text = canonical_json([name])
    assert text.encode("utf-8") == b'["a\\udcff\xc3\xa9"]'
    assert json.loads(text) == [name]
    assert digests.json_sha256(name) != digests.json_sha256("a\\udcffé")


def test_source_date_epoch_sets_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert make_provenance()["created_at"] == "1970-01-02T00:00:00Z"


@pytest.mark.parametrize("epoch", ["", "soon", "9" * 30, "-1"])
def test_a_senseless_source_date_epoch_is_ignored(monkeypatch: pytest.MonkeyPatch, epoch: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    assert make_provenance()["created_at"] > "2020"


def test_recorded_commit_is_that_of_bnncli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance_module._git_state.cache_clear()
    expected = make_provenance()["tool"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(commit, cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    provenance_module._git_state.cache_clear()
    assert make_provenance()["tool"] == expected


def test_provenance_names_no_user_and_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host")
    monkeypatch.setenv("USER", "secret-user")
    assert "secret" not in canonical_json(make_provenance())


def test_inputs_lie_where_links_lead_and_are_shown_without_detours(tmp_path: Path) -> None:
    (tmp_path / "far" / "posteriors").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "linked").symlink_to(tmp_path / "far" / "posteriors")
    entry = {"role": "train", "path": "../features/train.h5", "content_digest": "x"}
    for folder, shown in (("far/posteriors", "far/features"), ("run/linked", "run/linked/../features")):
        path = tmp_path / folder / "laplace.safetensors"
        header = check_header(path, "features", "1.0", "d", make_provenance(), {})
        assert header.input_path(entry) == tmp_path / shown / "train.h5"
