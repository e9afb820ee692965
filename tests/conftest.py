"""Marks that say what a strategy does not do, and why; and which strategies the conformance suite plays."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.forks import Forks
    from tests.support.softcuda.processes import EmulatedDevice

importlib.import_module("setuptools")  # brings distutils of its own, which must come before a library imports Python's

KINDS = ("notimpl", "notyet", "never")
MANY = 50
"""Number of new modules that are worth a collection."""

_frozen: dict[str, Any] = {"modules": 0, "file": None}


def pytest_configure(config: pytest.Config) -> None:
    """A run in the background of a shell ignores SIGINT, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (file := config.getoption("--outcomes")) and not hasattr(config, "workerinput"):
        from tests.support.outcomes import Recorder

        config.pluginmanager.register(Recorder(file))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Switch the garbage collector off while tests are collected."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`make test` plays files in two processes."""
    from tests.support.schedule import ByFile

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(mark.name == "forked" for mark in item.own_markers):
            raise pytest.UsageError(f"{item.nodeid}: `forked` marks modules; a test alone takes the fixture `forked`")
    if file := config.getoption("--not-run-in"):
        from tests.support.outcomes import Outcomes

        ran = Outcomes.read(file).ran
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ran])
        items[:] = [item for item in items if item.nodeid not in ran]
    if hasattr(config, "workerinput"):  # one of several processes, which all sort alike
        from tests.support.schedule import place

        items.sort(key=lambda item: place(item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze libraries and tests, among which the collection at a run's end would search for a second each time.

    What a file's tests leave behind joins them before the next file's.
    """
    if len(sys.modules) > _frozen["modules"] + MANY or item.path != _frozen["file"]:
        gc.collect()
        gc.freeze()
        _frozen.update(modules=len(sys.modules), file=item.path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strategies", action="append", default=[], help="conformance: play these strategies only (backend/*)"
    )
    parser.addoption("--whole", action="store_true", help="conformance: every case in every world")
    parser.addoption("--outcomes", type=Path, help="write what became of each test to this file")
    parser.addoption("--not-run-in", type=Path, help="play the tests that did not run in the run that wrote this file")
    parser.addoption("--marks", type=Path, help="conformance: a TOML file with a stranger's marks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"strategy", "size", "case"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("strategy", "size", "case"), _played(metafunc.config))


def _played(config: pytest.Config) -> list[Any]:
    from tests.conformance.cases import CASES, MESH_STRATEGIES, SIZES, SIZES_ONLY_VARIANT
    from tests.conformance.marks import MARKS, read_marks
    from tests.conformance.selection import select_cases
    from unipar import errors
    from unipar.backend import offered_strategies as backend_strategies
    from unipar.backend import registry
    from unipar.backend.offered_strategies import expand_strategy_patterns

    asked: list[str] = config.getoption("--strategies") or ["*"]
    strategies = expand_strategy_patterns((*asked, *(MESH_STRATEGIES if asked == ["*"] else ())))
    whole: bool = bool(config.getoption("--whole"))
    file: Path | None = config.getoption("--marks")
    known = list(MARKS) + (read_marks(file) if file else [])
    for mark in known:
        unknown = [c for c in mark.strategies if c.partition("/")[0] not in registry.backend_names()]
        if unknown or mark.kind not in KINDS:
            raise pytest.UsageError(f"a {mark.kind} mark names {unknown or mark.kind}")
    made: list[Any] = []
    for strategy in strategies:
        alone = backend_strategies.is_single_process(strategy)
        two = strategy.variant == SIZES_ONLY_VARIANT or (strategy.variant and not whole)  # two ranks show what sizes do
        sizes = (1,) if alone else (2,) if two else SIZES
        for size in (size for size in sizes if size % strategy.axes.fewest_ranks == 0):
            for name in select_cases(strategy, size, whole=whole):
                case = CASES[name]
                if size in case.sizes or (alone and case.sizes == SIZES):
                    marks = [m for m in known if m.fits(strategy, name, size)]
                    strict = [
                        mark
                        for m in marks
                        for mark in (
                            getattr(pytest.mark, m.kind)(str(strategy), raises=m.raises, reason=m.reason),
                            pytest.mark.xfail(raises=getattr(errors, m.raises), reason=m.reason, strict=True),
                        )
                    ]
                    made.append(pytest.param(strategy, size, name, id=f"{strategy}-{size}-{name}", marks=strict))
    return made


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes that have imported all libraries once, for all tests that start workers."""
    from tests.support.forks import LENT, Forks

    with Forks(LENT) as made:
        yield made


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedDevice]:
    """Processes with an emulated CUDA device; the test is skipped where it cannot be compiled."""
    from tests.support.softcuda.build import why_not_built
    from tests.support.softcuda.processes import EmulatedDevice

    if reason := why_not_built():
        pytest.skip(reason)
    with EmulatedDevice(tmp_path_factory.mktemp("emulated")) as device:
        yield device


@pytest.fixture
def forked(forks: Forks) -> Iterator[None]:
    """In one test all workers are forks."""
    with forks.instead():
        yield


@pytest.fixture(scope="module", autouse=True)
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a module marked `forked` all workers are forks; elsewhere they are what they are for users."""
    if request.node.get_closest_marker("forked") is None:
        yield
        return
    forks: Forks = request.getfixturevalue("forks")
    with forks.instead():
        yield


@pytest.fixture(autouse=True)
def _not_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU workers are what they are for users everywhere: CUDA does not survive a fork."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    from tests.support.forks import without_forks

    with without_forks():
        yield


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    """A test leaves `sys.path`, and the files of tasks that are imported, as it found them."""
    path, modules = list(sys.path), _task_modules()
    yield
    sys.path[:] = path
    for name in _task_modules() - modules:
        del sys.modules[name]
    importing = sys.modules.get("unipar.task.importing")
    files: dict[str, Any] = importing.imported_files if importing else {}
    for file in [file for file, module in files.items() if module.__name__ not in sys.modules]:
        del files[file]


def _task_modules() -> set[str]:
    """Names of this process's modules that are files of tasks."""
    return {name for name in sys.modules if name.startswith("unipar_task")}
