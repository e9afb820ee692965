"""Comparisons over two machines that share nothing: one command, started on each, with ranks on both."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine_launches import Job
from tests.support.machines.machine import Machine
from tests.support.machines.start import machines, reason_no_machines
from tests.support.programs import skip_because
from tests.support.tiny import __file__ as TINY

pytestmark = [pytest.mark.sweep, skip_because(reason_no_machines())]

CONFIG = f"""
task: {{use: {TINY}:Tiny}}
device: cpu
batch: {{total: 8}}
train: {{steps: 12, optimizer: {{name: sgd, lr: 0.01}}}}
log: {{every: 5}}
"""


@dataclass
class Commands:
    """Two machines with the config, and a way to start the same command on both."""

    made: list[Machine]
    logs: Path

    def run(self, command: str, *words: str) -> tuple[str, str]:
        """Return what each machine's process says, once both have ended well."""
        job = Job(self.made, (1, 1))
        started = [
            machine.start(line, self.logs / f"{command}-{machine.name}.log", env=job.env)
            for machine, line in job.commands("by hand", "unipar", command, "x.yaml", *words)
        ]
        codes = [process.wait(240) for process in started]
        texts = [(self.logs / f"{command}-{m.name}.log").read_text("utf-8") for m in self.made]
        first, second = (" ".join(text.split()) for text in texts)  # lines are folded
        assert codes == [0, 0], first + second
        return first, second

    def result(self, command: str) -> dict[str, Any]:
        """Return the command's result file, which is on the first machine."""
        return json.loads(self.made[0].path(f"/tmp/runs/x/{command}/{command}.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Generator[Commands]:
    folder = tmp_path_factory.mktemp("across")
    with machines(2, folder / "machines") as made:
        for machine in made:
            machine.path("/tmp/x.yaml").write_text(CONFIG, encoding="utf-8")
        yield Commands(list(made), folder)


def test_compare(commands: Commands) -> None:
    """Two ranks on each machine, with the losses of one process."""
    said, _ = commands.run("compare", "--world", "4", "--strategies", "native/nothing,deepspeed/nothing")
    assert "all 2 strategies agree with one process" in said
    assert "on 4 ranks on 2 machines" in said
    made = commands.result("compare")
    assert (made["ranks"], made["machines"]) == (4, 2)
    assert [row["strategy"] for row in made["strategies"]] == ["single", "native/nothing", "deepspeed/nothing"]


def test_scale(commands: Commands) -> None:
    """A world on one machine, and two over both: one with the same batch, one with the same share of a rank."""
    said, _ = commands.run("scale", "--world", "1,2", "--strategies", "native/nothing")
    assert "2 machines (ranks on machines), each: " in said
    worlds = [(world["ranks"], world["machines"]) for world in commands.result("scale")["worlds"]]
    assert worlds == [(1, 1), (2, 2), (2, 2)]


def test_verify(commands: Commands) -> None:
    """Each strategy has the numbers of one process."""
    said, _ = commands.run("verify", "--world", "2", "--strategies", "native/nothing,native/parameters")
    assert "all 2 strategies agree with one process" in said
    assert " on 2 ranks of 2 machines" in said
