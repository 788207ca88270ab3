"""The grammar of --assert, which scores an assertion means, and what evaluate does with one that does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from problems.command_line import Cli

from bnncli.errors import MissingInput, UsageError
from bnncli.options.scoring import Quantity, parse_assertion, parse_score
from bnncli.session.score_rows import AbsentPosterior, check_assertions, check_names, failure_text, spell_metrics

METRICS = ("nll", "ece", "auroc", "mmd2")


def assertion(text: str) -> Any:
    return parse_assertion(text, "--assert", METRICS)


def row(posterior: str, integrator: str = "mc", split: str = "test", **values: Any) -> dict[str, Any]:
    """A row of evaluate; values are numbers, or lists of metric rows."""
    metrics = []
    for name, value in values.items():
        metrics += (
            [{"name": name, **one} for one in value] if isinstance(value, list) else [{"name": name, "value": value}]
        )
    return {"posterior": posterior, "integrator": integrator, "split": split, "metrics": metrics}


ROWS = [
    row("map", "plug-in", nll=0.32, ece=0.04),
    row("laplace", nll=0.27, ece=0.01),
    row("laplace", "probit", nll=0.28, ece=0.02),
]


def checked(text: str, rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [
        (f"{c['posterior']}.{c['integrator']}@{c['split']}", c["holds"])
        for c in check_assertions([assertion(text)], rows)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "nll<=0.02",
        "laplace.nll<map.nll",
        "a-1.mc-qmc.auroc:kmnist:energy@val>=0.8",
        "ece!=1",
        "mmd2:unbiased<=0.01",
        "nll@test-2.x==-3",
        "laplace.mc.ece-excess:equal-mass@val<=0.01",
        "nll-high<map.nll-low",
    ],
)
def test_an_assertion_is_written_back_as_it_was(text: str) -> None:
    assert str(assertion(text.replace("<", " <").replace("@", "@"))) == text


def test_the_parts_of_an_assertion_are_told_apart() -> None:
    found = assertion("laplace.mc.auroc:kmnist:energy@val >= 8e-1")
    assert found.left == Quantity("auroc", ("kmnist", "energy"), "laplace", "mc", "val")
    assert (found.operator, found.right) == (">=", 0.8)
    assert assertion("map.nll < nll").left == Quantity("nll", (), "map")


@pytest.mark.parametrize(
    "text",
    ["", "nll", "nll=0.1", "nll=<0.1", "nll<", "<0.1", "nll<0.1<0.2", "nll<0.1%", ".nll<1", "a.b.c.nll<1", "nll:<1", "nll@<1", "n ll<1", "nll<>1"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected \[POSTERIOR"):
        assertion(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [("0.1>nll", "put the score there"), ("nll<nan", "finite"), ("nll<inf", "finite"), ("nil<1", "unknown metric 'nil'"), ("nll<map.nil", "unknown metric 'nil'"),
     ("ece-exces<1", "ece-exces<1: part of ece: expected one of excess, floor, low, high; got 'exces'"),
     ("nll-floor<1", "nll has no floor in 'nll-floor<1'; expected low or high, or a metric with floor: ece")],
)  # fmt: skip
def test_what_means_nothing_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        assertion(text)


def test_a_score_alone_has_no_posterior_and_no_split() -> None:
    assert parse_score("auroc:far", "--metric", METRICS) == Quantity("auroc", ("far",))
    for text in ("map.nll", "nll@val", "nll<1", "", "ece-excess"):
        with pytest.raises(UsageError, match="expected METRIC"):
            parse_score(text, "--metric", METRICS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("nll<0.3", [False, True, True]), ("nll<=0.27", [False, True, False]), ("nll>=0.28", [True, False, True]),
     ("nll>0.28", [True, False, False]), ("nll==0.27", [False, True, False]), ("nll!=0.27", [True, False, True])],
)  # fmt: skip
def test_without_a_posterior_every_one_is_held_against_the_number(text: str, expected: list[bool]) -> None:
    assert [holds for _, holds in checked(text, ROWS)] == expected


def test_a_posterior_without_integrator_means_all_of_its_integrators() -> None:
    assert checked("laplace.ece<=0.01", ROWS) == [("laplace.mc@test", True), ("laplace.probit@test", False)]
    assert checked("laplace.probit.ece<=0.01", ROWS) == [("laplace.probit@test", False)]


def test_every_posterior_is_compared_with_the_one_on_the_right_but_that_one_itself() -> None:
    assert checked("nll<map.nll", ROWS) == [("laplace.mc@test", True), ("laplace.probit@test", True)]
    assert checked("map.nll<ece", ROWS) == [("map.plug-in@test", False)]
    with pytest.raises(MissingInput, match="no other posterior"):
        check_assertions([assertion("nll<map.nll")], ROWS[:1])


def test_a_right_side_of_two_integrators_is_that_of_the_left_or_an_error_that_names_them() -> None:
    rows = [*ROWS, row("refine", nll=0.26)]
    assert checked("refine.nll<laplace.nll", rows) == [("refine.mc@test", True)]
    with pytest.raises(UsageError, match=r"is ambiguous; name one of laplace.mc.nll, laplace.probit.nll"):
        check_assertions([assertion("map.nll<laplace.nll")], ROWS)


def test_the_split_is_test_or_the_only_one_and_on_the_right_that_of_the_left() -> None:
    rows = [row("a", split=split, nll=value) for split, value in (("test", 1.0), ("val", 2.0))]
    rows += [row("b", split=split, nll=value) for split, value in (("test", 3.0), ("val", 0.0))]
    assert checked("nll<=1", rows) == [("a.mc@test", True), ("b.mc@test", False)]
    assert checked("a.nll@val<b.nll", rows) == [("a.mc@val", False)]
    assert checked("a.nll@val<b.nll@test", rows) == [("a.mc@val", True)]
    assert checked("nll<=1", [row("a", split="val", nll=2.0)]) == [("a.mc@val", False)]
    with pytest.raises(UsageError, match=r"name the split with @SPLIT, one of val, dev"):
        checked("nll<1", [row("a", split=split, nll=1.0) for split in ("val", "dev")])


def test_the_usual_form_of_a_score_is_meant_and_others_are_named_by_their_choices() -> None:
    ece = [{"value": 0.1, "strategy": "equal-mass"}, {"value": 0.3, "strategy": "equal-width"}]
    auroc = [{"value": 0.9, "ood": "far", "score": "max_prob"}, {"value": 0.5, "ood": "far", "score": "entropy"}]
    rows = [row("a", ece=ece, auroc=auroc)]
    texts = (
        "ece>0.2",
        "ece:equal-width>0.2",
        "ece:equal-mass<0.2",
        "auroc>0.8",
        "auroc:entropy<0.6",
        "auroc:far:entropy<0.6",
    )
    assert [checked(text, rows)[0][1] for text in texts] == [True] * 6
    with pytest.raises(UsageError, match=r"no score ece:equal-mess \(have: ece:equal-mass, ece:equal-width"):
        checked("ece:equal-mess<1", rows)


def test_a_score_that_may_mean_two_is_an_error_that_names_them() -> None:
    auroc = [{"value": 0.9, "ood": ood, "score": "max_prob"} for ood in ("near", "far")]
    with pytest.raises(UsageError, match="is ambiguous; name one of auroc:near, auroc:far"):
        checked("auroc>0.5", [row("a", auroc=auroc)])
    assert spell_metrics([{"name": "auroc", "value": 1.0, "n": 3}]) == ["auroc"]


def test_an_undefined_score_fails_with_its_reason() -> None:
    undefined = [{"value": None, "undefined": "no labels"}]
    rows = [row("a", nll=undefined), row("b", nll=0.1)]
    checks = check_assertions([assertion("nll<1")], rows)
    assert [(c["holds"], c["left"], c.get("reason")) for c in checks] == [(False, None, "no labels"), (True, 0.1, None)]
    assert failure_text(checks) == "nll of a (mc, test) is undefined (no labels), expected nll<1"
    right = check_assertions([assertion("b.nll<a.nll")], rows)
    assert (right[0]["holds"], right[0]["right"], right[0]["reason"]) == (False, None, "a.nll: no labels")


def test_a_posterior_that_lacks_what_the_others_have_fails() -> None:
    far = {"value": 0.9, "ood": "far"}
    rows = [row("a", auroc=[far]), row("b", auroc=[{"value": 0.9, "ood": "near"}]), row("c", nll=1.0)]
    assert checked("auroc:far>0", rows) == [("a.mc@test", True), ("b.mc@test", False)]
    with pytest.raises(UsageError, match=r"a \(mc, test\) has no score ece \(have: auroc\)"):
        checked("ece<1", rows)
    with pytest.raises(UsageError, match=r"c \(mc, test\) has no score auroc"):
        checked("c.auroc:far>0", rows)


def test_a_distance_to_the_reference_is_not_asked_of_the_reference_itself() -> None:
    rows = [
        row(name, mmd2=[{"value": value, "undefined": "itself", "reference": "hmc"}])
        for name, value in (("a", 0.0), ("hmc", None))
    ]
    assert checked("mmd2<=0.01", rows) == [("a.mc@test", True)]
    assert checked("hmc.mmd2<=0.01", rows) == [("hmc.mc@test", False)]
    with pytest.raises(UsageError, match="the reference is the only posterior"):
        checked("mmd2<=0.01", rows[1:])


def test_a_part_of_a_score_is_what_is_compared() -> None:
    ece = [{"value": 0.024, "floor": 0.02, "excess": 0.004, "interval": {"low": 0.0, "high": 0.015}}]
    rows = [row("a", ece=ece, nll=[{"value": 0.3, "interval": None}])]
    texts = ("ece<=0.02", "ece-excess<=0.01", "ece-excess<=0.003", "ece-floor==0.02", "ece-low<=0", "ece-high<=0.01")
    assert [checked(text, rows)[0][1] for text in texts] == [False, True, False, True, True, False]
    checks = check_assertions([assertion("ece-high<=0.01"), assertion("nll-high<1")], rows)
    assert failure_text(checks) == (
        "ece-high of a (mc, test) is 0.015, expected ece-high<=0.01; "
        "nll-high of a (mc, test) is undefined (it has no interval), expected nll-high<1"
    )


STALE = AbsentPosterior("refine", "refine.mc", "it is stale")


def test_what_is_asserted_of_every_posterior_fails_for_one_that_is_absent() -> None:
    unpredicted = AbsentPosterior("hmc", "hmc", "it has no predictions", is_predicted=False)
    checks = check_assertions([assertion("nll<1"), assertion("hmc.nll<1")], ROWS, [STALE, unpredicted])
    assert [check["holds"] for check in checks] == [True, True, True, False, False]
    assert failure_text(checks) == (
        "nll of refine.mc is unknown (it is stale), expected nll<1; predict refine, or name another: POSTERIOR.nll; "
        "nll of hmc is unknown (it has no predictions), expected hmc.nll<1; predict hmc, or name another: POSTERIOR.nll"
    )


def test_an_absent_posterior_that_is_named_on_either_side_fails_and_others_are_not_its_matter() -> None:
    for text in ("refine.nll<1", "refine.mc.nll<1", "nll<refine.nll", "map.nll<refine.nll"):
        check_names([assertion(text)], ROWS, [STALE])
        (check,) = check_assertions([assertion(text)], ROWS, [STALE])
        assert (check["holds"], check["name"], check["reason"]) == (False, "refine.mc", "it is stale")
    assert [holds for _, holds in checked_with("map.nll<1", [STALE])] == [True]
    assert [name for name, holds in checked_with("nll<map.nll", [STALE]) if not holds] == ["refine.mc"]
    half = [AbsentPosterior("laplace", "laplace.bridge", "it is stale")]
    assert [name for name, holds in checked_with("laplace.nll<1", half) if not holds] == ["laplace.bridge"]
    assert [name for name, holds in checked_with("laplace.probit.nll<1", half) if not holds] == []


def checked_with(text: str, absent: list[AbsentPosterior]) -> list[tuple[str, bool]]:
    return [(check["name"], check["holds"]) for check in check_assertions([assertion(text)], ROWS, absent)]


def test_predictions_of_other_splits_alone_are_absent_too_and_the_reference_of_a_distance_is_not() -> None:
    rows = [row("a", nll=0.1, mmd2=0.0), row("b", split="val", nll=0.1, mmd2=0.0)]
    checks = check_assertions([assertion("nll<1")], rows)
    assert [(c["posterior"], c["holds"]) for c in checks] == [("a", True), ("b", False)]
    assert checks[1]["reason"] == "no predictions of split 'test'"
    absent = [AbsentPosterior("hmc", "hmc", "it has no predictions")]
    checks = check_assertions([assertion("mmd2<1")], rows[:1], absent, references=["hmc"])
    assert [check["holds"] for check in checks] == [True]


def test_the_failure_names_every_number_that_failed() -> None:
    checks = check_assertions(
        [assertion("ece<=0.01"), assertion("nll<map.nll"), assertion("map.nll<laplace.mc.nll")], ROWS
    )
    assert failure_text(checks) == (
        "ece of map (plug-in, test) is 0.04, expected ece<=0.01; ece of laplace (probit, test) is 0.02, expected ece<=0.01; "
        "nll of map (plug-in, test) is 0.32, expected map.nll<laplace.mc.nll (0.27)"
    )
    close = check_assertions([assertion("nll<=0.3")], [row("a", nll=0.30000001)])
    assert failure_text(close) == "nll of a (mc, test) is 0.30000001, expected nll<=0.3"
    assert failure_text(check_assertions([assertion("nll<1")], ROWS)) is None


@pytest.mark.parametrize("text", ["nobody.nll<1", "nll<nobody.nll", "map.mc.nll<1", "nll@tst<1"])
def test_names_that_are_not_there_are_told_before_there_are_scores(text: str) -> None:
    names = [{key: value for key, value in one.items() if key != "metrics"} for one in ROWS]
    with pytest.raises(MissingInput, match="\0assert_\0"):
        check_names([assertion(text)], names)


def metrics_of(run: Path) -> Path:
    return run.with_name("small.bnn") / "metrics"


def test_evaluate_exits_3_names_the_numbers_and_prints_all_the_same(cli: Cli, small_run: Path) -> None:
    table = cli("evaluate", small_run).stdout
    done = cli("evaluate", small_run, "--assert", "accuracy>=0", "--assert", "nll<=0.001")
    assert (done.code, done.stdout) == (3, table)
    for line in ("nll of map (plug-in, test) is ", "nll of hmc (mc, test) is ", "expected nll<=0.001"):
        assert line in done.stderr
    document = cli("evaluate", small_run, "--assert", "map.nll<=0.001", "--assert", "map.accuracy>=0", "--json").json
    assert (document["ok"], document["exit"], document["error"]["code"]) == (False, 3, "assertion_failed")
    assert [(c["expr"], c["holds"]) for c in document["checks"]] == [
        ("map.nll<=0.001", False),
        ("map.accuracy>=0", True),
    ]
    values = {
        m["name"]: m["value"]
        for r in document["rows"]
        if r["posterior"] == "map" and r["split"] == "test"
        for m in r["metrics"]
    }
    assert document["checks"][0]["left"] == values["nll"]


def test_a_wrong_assertion_is_told_before_any_work(cli: Cli, small_run: Path) -> None:
    for path in metrics_of(small_run).iterdir():
        path.unlink()
    for text, code in (
        ("nll<", 2),
        ("nil<1", 2),
        ("nobody.nll<1", 66),
        ("laplace.probit.nll<1", 66),
        ("nll@far<1", 66),
    ):
        done = cli("evaluate", small_run, "--assert", text)
        assert (done.code, done.stdout, list(metrics_of(small_run).iterdir())) == (code, "", [])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--assert", "map.accuracy@val>=90"), "write map.accuracy@val>=0.9"),
        (("--assert", "ece-low<=2"), "write ece-low<=0.02"),
        (("--assert", "accuracy>=90%"), "write accuracy>=0.9"),
        (("--assert", "auc>=0.9"), "did you mean 'auroc'?"),
        (("--assert", "f1>=0.9"), "did you mean 'macro_f1'?"),
        (("--metric", "acc"), "did you mean 'accuracy'?"),
    ],
)
def test_what_was_meant_is_told(cli: Cli, small_run: Path, words: tuple[str, ...], hint: str) -> None:
    cli("evaluate", small_run, *words).expect(2, f"hint: {hint}")


def test_assertions_from_config(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text('[evaluate]\nassert = ["nll<0"]\n')
    cli("evaluate", small_run, "--config", tmp_path / "c.toml").expect(3)
    monkeypatch.setenv("BNNCLI_EVALUATE_ASSERT", "nll>0;accuracy<0")
    assert "expected accuracy<0" in cli("evaluate", small_run).stderr
    shown = cli("config", "show", "evaluate").stdout
    assert any(line.split("|")[1].strip() == "assert" for line in shown.splitlines() if "ASSERT" in line)


def test_a_dry_run_checks_names_and_holds_nothing(cli: Cli, small_run: Path) -> None:
    cli("evaluate", small_run, "--dry-run", "--assert", "nll<0").expect(0)
    cli("evaluate", small_run, "--dry-run", "--assert", "nobody.nll<0").expect(66)


def test_stale_posterior_fails_assertions(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    arrays = dict(np.load(small_run.with_name("features.npz")))
    arrays["labels_train"] = (arrays["labels_train"] + (np.arange(240) % 7 == 0)) % 3
    np.savez(small_run.with_name("other.npz"), **arrays)
    words = ("--from-npz", small_run.with_name("other.npz"), "--ood", "far", "--force")
    cli("extract-features", small_run, *words).expect(0)
    cli("predict", small_run).expect(0)
    cli("evaluate", small_run, "--bootstrap", 20, "--force").expect(0)
    monkeypatch.setenv("BNNCLI_EVALUATE_BOOTSTRAP", "20")
    done = cli("evaluate", small_run, "--assert", "nll<100").expect(3, "nll of laplace.mc is unknown (", "stale")
    assert "nll of map " not in done.stderr.partition("nll of laplace.mc")[2].partition("\n")[0]
    cli("evaluate", small_run, "--assert", "laplace.nll<100").expect(3)
    cli("evaluate", small_run, "--assert", "map.nll<100").expect(0)
    document = cli("evaluate", small_run, "--assert", "nll<100", "--json").json
    assert {c["posterior"] for c in document["checks"] if not c["holds"]} == {"laplace", "refine", "hmc"}


def test_ends_of_intervals_and_excess_are_asserted_from_the_command_line(cli: Cli, small_run: Path) -> None:
    words = ("--assert", "map.ece-low<=0.5", "--assert", "map.ece-excess:class-wise<=0.5", "--assert", "map.mce-high>0")
    cli("evaluate", small_run, *words).expect(0)
    cli("evaluate", small_run, "--assert", "map.ece-excess>1").expect(3)
    none = ("--bootstrap", 0, "--force", "--posterior", "map", "--assert")
    cli("evaluate", small_run, *none, "ece-low<1").expect(2, "--assert: --bootstrap 0 computes no intervals")
    cli("evaluate", small_run, *none, "ece-floor<1").expect(0)
