"""Verdicts of a verification: the sentence below the table, the exit code, and what verify.json holds."""

from __future__ import annotations

import json

import pytest

from unipar.results.verdicts import CutDependence, Verdict, VerdictOutcome, Verdicts

CUT = CutDependence(kind="sum", off=0.5, micro=None, way_out="return the mean")


def verdicts(*outcomes: VerdictOutcome) -> Verdicts:
    reason = {"refused": "train.local_steps: 2 is not available here; use another"}
    rows = [
        Verdict(strategy=f"native/{i}", outcome=outcome, note=reason.get(outcome, ""))
        for i, outcome in enumerate(outcomes)
    ]
    return Verdicts(name="x", out="runs/x", precision="fp32", ranks=2, steps=10, rows=rows)


@pytest.mark.parametrize(
    ("outcomes", "summary", "code"),
    [
        (("agrees", "agrees"), "all 2 strategies agree with one process over 10 steps on 2 ranks", 0),
        (
            ("agrees", "agrees", "refused", "refused"),
            "2 of 4 strategies agree with one process over 10 steps on 2 ranks; 2 cannot run this model: native/2, "
            "native/3 (train.local_steps: 2 is not available here)",
            0,
        ),
        (
            ("agrees", "failed", "absent"),
            "1 of 3 strategies agrees with one process over 10 steps on 2 ranks; 1 failed; 1 not installed: native/2",
            1,
        ),
        (
            ("refused", "refused"),
            "no verdict: no strategy ran; 2 cannot run this model: native/0, native/1 (train.local_steps: 2 is not "
            "available here)",
            1,
        ),
        (("agrees", "disagrees"), "1 of 2 strategies disagrees with one process over 10 steps on 2 ranks", 1),
        (("disagrees", "disagrees"), "2 of 2 strategies disagree with one process over 10 steps on 2 ranks", 1),
        (
            ("disagrees", "absent"),
            "native/0 disagrees with one process over 10 steps on 2 ranks; 1 not installed: native/1",
            1,
        ),
        (("agrees", "failed"), "native/0 agrees with one process over 10 steps on 2 ranks; 1 failed", 1),
        (("failed", "failed"), "no verdict: no strategy ran; 2 failed", 1),
    ],
)
def test_summary(outcomes: tuple[VerdictOutcome, ...], summary: str, code: int) -> None:
    """The first line below the table counts the strategies, and the exit code is 0 only if all that ran agree."""
    found = verdicts(*outcomes)
    assert (found.summary, found.code) == (summary, code)
    assert found.remark_lines()[0] == summary


@pytest.mark.parametrize("outcome", ["refused", "absent"])
def test_a_strategy_that_was_named_and_cannot_run(outcome: VerdictOutcome) -> None:
    """The exit code is that of Unsupported, 3, unless a strategy disagrees; it stays 0 for one that a pattern gave."""
    found = verdicts("agrees", outcome)
    agrees, missing = found.rows
    assert found.code == 0
    assert found.changed(rows=[agrees, missing.changed(named=True)]).code == 3
    wrong = agrees.changed(outcome="disagrees")
    assert found.changed(rows=[wrong, missing.changed(named=True)]).code == 1


def test_one_process_out_of_a_pattern_is_not_counted() -> None:
    """All strategies agree, although the pattern also gave nn.DataParallel, which is one process."""
    found = verdicts("agrees", "agrees", "refused")
    rows = [*found.rows[:2], found.rows[2].changed(alone=True)]
    assert found.changed(rows=rows).summary == "all 2 strategies agree with one process over 10 steps on 2 ranks"


def test_a_training_that_depends_on_the_cut_is_no_plain_yes() -> None:
    """The first line says so; with strict the exit code is 1, without it 0."""
    found = verdicts("agrees", "agrees").changed(cut_dependence=CUT)
    whole = (
        "all 2 strategies agree with one process over 10 steps on 2 ranks, and the training depends on how a batch is "
        "cut, so another number of ranks trains another model"
    )
    assert (found.remark_lines()[:2], found.code) == ([whole, "  way out: return the mean"], 0)
    strict = found.changed(strict=True)
    assert strict.code == 1
    assert strict.remark_lines()[2] == "  with --strict, this alone makes the exit code 1"
    assert strict.changed(cut_dependence=None).code == 0
    fixed = found.changed(cut_dependence=CUT.changed(micro=8))
    assert fixed.summary == f"{whole} unless batch.micro stays 8"


def test_json_holds_the_verdict() -> None:
    """The summary, the reason and the exit code are in verify.json."""
    found = verdicts("agrees").changed(cut_dependence=CUT, strict=True, fp64_error="RuntimeError: no Double")
    said = json.loads(json.dumps(found.model_dump(mode="json")))
    assert said["cut_dependence"] == {"kind": "sum", "off": 0.5, "micro": None, "way_out": "return the mean"}
    assert (said["summary"], said["strict"], said["code"]) == (found.summary, True, 1)
    assert said["fp64_error"] == "RuntimeError: no Double"
    assert json.loads(json.dumps(verdicts("agrees").model_dump(mode="json")))["cut_dependence"] is None
