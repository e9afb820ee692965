"""A real Jupyter kernel: a task that was typed into a cell trains in ranks of its own."""

from __future__ import annotations

import html
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.forks import Forks, connection_of
from tests.support.notebooks import Kernel, Said, kernel_in
from tests.support.world import PYTHONPATH_VARIABLE, eventually, is_running
from unipar.run_folder.run_log import RunLog

LAST = "(12, 3.385"  # further digits are the processor's


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Generator[Kernel]:
    folder, connection = tmp_path_factory.mktemp("notebook"), connection_of(forks.plain).fileno()
    with kernel_in(folder, PYTHONPATH_VARIABLE, [connection]) as made:
        yield made


@pytest.fixture(scope="module")
def forking(kernel: Kernel, forks: Forks) -> Kernel:
    """The kernel, which starts its workers as forks from here on."""
    server = f"server_of(socket(fileno={connection_of(forks.plain).fileno()}), {forks.plain.pid})"
    lend = f"forks = Forks([({{}}, {server})]).instead()\nforks.__enter__()"
    said = kernel.run(f"from socket import socket\nfrom tests.support.forks import Forks, server_of\n{lend}")
    assert said.error == ""
    return kernel


def folder_of(kernel: Kernel) -> Path:
    return Path(eval(kernel.run("os.getcwd()").result))


def test_a_class_of_a_cell(kernel: Kernel) -> None:
    """Two ranks train it; progress is one line that changes, and the report is a table, and shows its page."""
    said = kernel.run("report = unipar.launch(CONFIG, task=Mine, overrides={'out': 'a'})\nprint(report.losses)\nreport")
    assert said.error == ""
    assert LAST in said.stdout
    assert said.live[:2] == ["run folder: a", "native/nothing, 2 ranks, 5 parameters"]
    assert said.live[2].startswith("step 1/12  loss 7.2072  ")
    assert said.live[-1].startswith("12 steps in ")
    assert len(said.displays) == 1
    assert said.stderr == ""
    page = (folder_of(kernel) / "a/report.html").read_text("utf-8")
    assert said.page.startswith(f'<iframe srcdoc="{html.escape(page)}" ')
    assert said.result.startswith("strategy    native/nothing, 2 ranks")
    told = (folder_of(kernel) / "a/launch.json").read_text("utf-8")
    assert '"carried": "Mine: ' in told


def test_functions_of_a_cell(forking: Kernel) -> None:
    """Lambdas too, and to a world of one: they travel by value."""
    made = "made = dict(model=lambda: nn.Linear(4, 1), loss=Mine().loss, data=Mine().data)\n"
    run = "unipar.launch(CONFIG, **made, overrides={'out': 'b', 'parallel.data': 1}, quiet=True).losses[-1]"
    said = forking.run(made + run)
    assert (said.error, said.stderr, said.live) == ("", "", [])
    assert said.result.startswith(LAST)


def test_a_cell_that_is_interrupted(forking: Kernel) -> None:
    """All ranks stop at a step boundary; the kernel lives on."""
    asked = forking.begin(
        "pause = 0.01\nunipar.launch(CONFIG, task=Mine, overrides={'out': 'c', 'train.steps': 100000})"
    )
    time.sleep(0.5)
    where = Path(str(forking.manager.provisioner.cwd))
    run_logs = [where / f"c/rank-{rank}.jsonl" for rank in (0, 1)]
    eventually(lambda: all(x.exists() and '"step": 1,' in x.read_text("utf-8") for x in run_logs), "no step", 60)
    ranks = [next(RunLog.read(x))["pid"] for x in run_logs]
    forking.manager.interrupt_kernel()
    said = forking.end(asked)
    assert said.error.startswith("Stopped: stopped by SIGINT after step ")
    assert not any(is_running(pid) for pid in ranks)
    assert forking.run("pause = 0.0\n1 + 1").result == "2"


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("threading.Lock()", "cannot pickle '_thread.lock' object"),
        ("open(os.devnull)", "it holds an open file"),
        ("torch.empty(1, device='meta')", "it holds a tensor on meta"),
    ],
    ids=["a lock", "an open file", "a tensor elsewhere"],
)
def test_a_class_that_cannot_travel(held: str, why: str, kernel: Kernel) -> None:
    """The reason and two ways out, before anything starts; nothing is written."""
    said = kernel.run(
        f"class Holds(Mine):\n    held = {held}\nunipar.launch(CONFIG, task=Holds, overrides={{'out': 'never'}})"
    )
    assert said.error.startswith(f"TaskError: Holds cannot be sent to other processes: {why}")
    assert said.error.endswith(
        "; create such objects in its methods, which each rank calls for itself, or put it into a file and import it "
        "from there"
    )
    assert kernel.run("os.path.exists('never')").result == "False"


def test_a_class_that_is_not_whole(kernel: Kernel) -> None:
    """A task in a cell is checked like one in a file."""
    said = kernel.run("class Half(unipar.Task):\n    def model(self): ...\nunipar.launch(CONFIG, task=Half)")
    assert said.error == "TaskError: Half does not have data(), loss()"


def test_join_in_a_cell(kernel: Kernel) -> None:
    """There is no script to run again, though a kernel looks like one: the error names launch."""
    said = kernel.run("with unipar.join(CONFIG, model=Mine().model, loss=Mine().loss) as run: pass")
    assert said.error == (
        "TaskError: join runs the script that calls it again in each rank, and this is a prompt or a notebook: put "
        "the loop into a file, or use launch() with a task"
    )


def test_without_cloudpickle(kernel: Kernel) -> None:
    """Both ways out."""
    said = kernel.run(
        "from unittest.mock import patch\n"
        "with patch('unipar.task.pickled.find_spec', lambda name: None):\n    unipar.launch(CONFIG, task=Mine)"
    )
    assert said.error == (
        "TaskError: Mine was defined in a prompt, a notebook or a -c command; sending it to other processes needs "
        "cloudpickle: pip install 'unipar[notebook]', or put it into a file and import it from there"
    )


def test_compare_in_a_cell(forking: Kernel) -> None:
    """Every strategy's ranks are handed the class."""
    said = forking.run(
        "found = unipar.compare(CONFIG, task=Mine, strategies=['native/parameters'], overrides={'out': 'd', "
        "'compare': {'repeat': 1, 'memory': False}})\nprint([(row.strategy, row.outcome) for row in found.rows])\nfound"
    )
    assert (said.error, said.stdout) == ("", "[('single', 'ran'), ('native/parameters', 'ran')]\n")
    assert_shown(said, folder_of(forking) / "d/compare/report.html", "\npage: d/compare/report.html")


def test_verify_in_a_cell(forking: Kernel) -> None:
    """The verdicts are a table, and show their page."""
    said = forking.run(
        "unipar.verify(CONFIG, task=Mine, strategies=['native/parameters'], steps=2, "
        "overrides={'out': 'e'}, overwrite=True)"
    )
    assert (said.error, said.stdout) == ("", "")
    assert_shown(said, folder_of(forking) / "e/verify/report.html", "agrees with one process over 2 steps")


def assert_shown(said: Said, page: Path, sentence: str) -> None:
    """Raise AssertionError unless the result is this page and this sentence, and its progress was one line."""
    assert said.page.startswith(f'<iframe srcdoc="{html.escape(page.read_text("utf-8"))}" ')
    assert sentence in said.result
    assert len(said.displays) == 1
    assert len(said.live) > 3
    assert said.stderr == ""


def test_a_page_that_is_gone(forking: Kernel) -> None:
    """Then the result is the screen alone."""
    said = forking.run("(found.page.unlink(), found)[1]")
    assert (said.error, said.page) == ("", "")
    assert "\n\nstrategy " in said.result
