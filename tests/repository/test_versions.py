"""What `make versions` asks for, counts and prints."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.torch_environment import (
    DISK_BYTES,
    NoEnvironment,
    constraints_for,
    environments_folder,
    find_python,
    newer_pythons,
    oldest_and_newest,
    only_user,
    pinned_torch,
    require_space,
    torch_requirement,
)
from tests.support.versions import (
    HOROVOD_TESTS,
    TESTS,
    SuiteCounts,
    VersionResult,
    exit_code,
    planned,
    read_tests,
    report,
    row_of,
)
from tests.support.world import ROOT

RELEASES = ["2.15.0", "2.16.0rc1", "2.13.0+cpu", "2.13.0", "2.11.0", "2.10.0"]


def result(torch: str = "2.11.0+cu130", **changed: object) -> VersionResult:
    """A version under which all went well."""
    fine: dict[str, object] = {
        "python": "3.11.2",
        "tests": SuiteCounts(passed=3, skipped=1, reasons=Counter({"no GPU": 1})),
        "verified": {"single": "agrees", "native/nothing": "agrees"},
        "unnamed": {"single": "", "native/nothing": ""},
        "peaks": {"single": 1000, "native/nothing": 2000},
        "seconds": {"set-up": 60.0, "tests": 300.0, "verify": 60.0, "compare": 60.0},
        "codes": {"verify": 0, "compare": 0},
    }
    return VersionResult(torch, **{**fine, **changed})  # pyright: ignore[reportArgumentType]


def test_the_oldest_is_what_pyproject_allows() -> None:
    """Neither release candidates nor local labels count; an index with nothing that is allowed is an error."""
    assert oldest_and_newest(RELEASES, Requirement("torch>=2.11")) == ["2.11.0", "2.15.0"]
    assert oldest_and_newest(RELEASES, Requirement("torch>=2.13,<2.15")) == ["2.13.0"]
    with pytest.raises(NoEnvironment, match=r"^the package index has no release of torch>=3$"):
        oldest_and_newest(RELEASES, Requirement("torch>=3"))


def test_what_pyproject_asks_of_torch(tmp_path: Path) -> None:
    """The oldest torch is read from the file, not written a second time."""
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\ndependencies = ["torchmetrics", "torch>=2.9"]\n', "utf-8")
    assert str(torch_requirement(file)) == "torch>=2.9"
    assert torch_requirement().name == "torch"


def test_constraints_change_torch_alone() -> None:
    """All else stays pinned; without exactly one line for torch nothing would be held."""
    assert constraints_for("2.11.0", "a==1\ntorch==2.13.0\ntornado==6\n") == "a==1\ntorch==2.11.0\ntornado==6\n"
    with pytest.raises(NoEnvironment, match=r"^constraints.txt pins torch 0 times; it must be once$"):
        constraints_for("2.11.0", "tornado==6\n")
    assert "torch==2.11.0\n" in constraints_for("2.11.0", (ROOT / "constraints.txt").read_text("utf-8"))


def test_newer_pythons_are_those_that_pyproject_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `requires-python` allows; an older one than this is not newer, and a shim without a Python is none."""
    assert newer_pythons() == [f"3.{minor}" for minor in (12, 13) if minor > sys.version_info.minor]
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nclassifiers = ["Programming Language :: Python :: 3.99", "Typing :: Typed"]\n', "utf-8")
    assert newer_pythons(file) == ["3.99"]
    (tmp_path / "python3.99").write_text("#!/bin/sh\nexit 127\n", "utf-8")
    (tmp_path / "python3.99").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_python("3.99") is None
    (tmp_path / "python3.99").write_text("#!/bin/sh\n", "utf-8")
    assert find_python("3.99") == str(tmp_path / "python3.99")


def test_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch with a part of the suite, another Python with all of it and the pinned torch."""
    pinned = pinned_torch((ROOT / "constraints.txt").read_text("utf-8"))
    own = getattr(sys, "_base_executable", sys.executable)
    assert list(planned(["2.11.0"], [])) == [("2.11.0", own, TESTS)]
    assert list(planned([], ["/a", "/b"])) == [(pinned, "/a", ("tests",)), (pinned, "/b", ("tests",))]
    assert list(planned(["2.11.0"], ["/a"])) == [("2.11.0", "/a", TESTS)]
    monkeypatch.setattr("tests.support.versions.released_versions", lambda: RELEASES)
    monkeypatch.setattr("tests.support.versions.newer_pythons", lambda: ["3.12", "3.13"])
    monkeypatch.setattr("tests.support.versions.find_python", {"3.13": "/c"}.get)
    assert list(planned([], [])) == [("2.11.0", own, TESTS), ("2.15.0", own, TESTS), (pinned, "/c", ("tests",))]


def test_the_size_is_said_before_the_download(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too little room is an error, with the sizes and the way out."""
    require_space(tmp_path, "2.11.0", 2 * DISK_BYTES)
    assert capsys.readouterr().err == (
        f"torch 2.11.0: about 2.0 GiB to download, 6.5 GiB on disk, into {tmp_path} (13 GiB free); "
        "kept there for later calls\n"
    )
    with pytest.raises(NoEnvironment) as raised:
        require_space(tmp_path, "2.11.0", 2**30)
    assert str(raised.value) == (
        "an environment with torch 2.11.0 takes about 2.0 GiB to download, 6.5 GiB on disk; "
        f"{tmp_path} has 1.0 GiB free: make room, or name another folder: UNIPAR_VERSIONS=FOLDER"
    )


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the user's cache, unless another one is named; two calls at once do not share it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNIPAR_VERSIONS", raising=False)
    assert environments_folder() == tmp_path / "unipar/versions"
    monkeypatch.setenv("UNIPAR_VERSIONS", str(tmp_path / "other"))
    assert environments_folder() == tmp_path / "other"
    with only_user(tmp_path / "other"), pytest.raises(NoEnvironment) as raised, only_user(tmp_path / "other"):
        pass
    assert str(raised.value) == (
        f"another `make versions` uses {tmp_path}/other; wait for it, or name another folder: UNIPAR_VERSIONS=FOLDER"
    )
    with only_user(tmp_path / "other"):  # free again
        pass


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="x"/></testcase>
<testcase classname="tests.a" name="three"><error message="x"/></testcase>
<testcase classname="tests.a" name="four"><skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase classname="tests.a" name="five"><skipped type="pytest.xfail" message="never"/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_reports(tmp_path: Path) -> None:
    """An error counts as a failure, an expected failure as passed; a run without a report has failed."""
    file = tmp_path / "tests.xml"
    assert read_tests(file, 3).failed == ["pytest itself: exit 3, without a report"]
    file.write_text(REPORT, "utf-8")
    counts = read_tests(file, 1)
    assert (str(counts), counts.failed, dict(counts.reasons)) == (
        "2 / 2 / 1",
        ["tests.a::two", "tests.a::three"],
        {"no GPU": 1},
    )
    file.write_text('<testsuite><testcase classname="tests.a" name="one"/></testsuite>', "utf-8")
    assert read_tests(file, 0).failed == []
    assert read_tests(file, 4).failed == ["pytest itself: exit 4"]


def test_a_row_and_its_remarks() -> None:
    """Numbers in the row, reasons below the table."""
    one = result(horovod="horovod 0.28.1 cannot be built yet; missing: nvcc", verified={"single": "disagrees"})
    assert row_of(one) == (
        *("2.11.0+cu130", "3.11.2", "3 / 0 / 1", "0 of 1", "2 of 2", "left out", "1 min 00 s", "7 min 00 s"),
    )
    assert row_of(VersionResult("2.11.0", problem="no room")) == ("2.11.0", "not tried: no room")
    other = result("2.15.0+cu130", peaks={"single": 1020, "native/nothing": 2000})
    names = ", ".join(HOROVOD_TESTS)
    assert report([one, other]).splitlines()[3:] == [
        f"torch 2.11.0+cu130, Python 3.11.2: Horovod is left out, with {names}: "
        "horovod 0.28.1 cannot be built yet; missing: nvcc",
        "torch 2.11.0+cu130, Python 3.11.2: verify: single: disagrees",
        "torch 2.11.0+cu130, Python 3.11.2: skipped 1: no GPU",
        "torch 2.15.0+cu130, Python 3.11.2: skipped 1: no GPU",
        "allocated at the peak, torch 2.15.0+cu130, Python 3.11.2 against torch 2.11.0+cu130, Python 3.11.2: "
        "2 strategies, largest difference +2.0 % (single; 3 % is allowed)",
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"problem": "no room"},
        {"tests": SuiteCounts(passed=3, failed=["tests.a::two"])},
        {"tests": SuiteCounts(skipped=3)},
        {"verified": {"single": "agrees", "native/nothing": "disagrees"}},
        {"verified": {}},
        {"unnamed": {"single": "MISSED: 3.00 % in update"}},
        {"unnamed": {}},
        {"codes": {"verify": 0, "compare": 1}},
        {"peaks": {"single": 1031, "native/nothing": 2000}},
    ],
)
def test_whatever_went_wrong_is_exit_1(changed: dict[str, object]) -> None:
    """In either version; Horovod alone may be left out."""
    assert exit_code([result(horovod="missing: nvcc"), result("2.15.0")]) == 0
    assert exit_code([result(), result("2.15.0", **changed)]) == 1


def test_the_part_of_the_suite_is_there() -> None:
    """What is named exists, and so do the tests that need Horovod."""
    assert [name for name in TESTS if not (ROOT / name).exists()] == []
    files = {name.partition("::")[0] for name in HOROVOD_TESTS}
    assert [name for name in files if not (ROOT / name).exists()] == []
