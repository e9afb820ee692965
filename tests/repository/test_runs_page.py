"""The transcript in docs/runs.md: its commands are run, and print what it shows, times and sizes apart."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.launchers import environment, in_private_network
from tests.support.transcript import check_shown, masked

ROOT = Path(__file__).parents[2]
README, PAGE = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/runs.md"))


def transcript() -> list[tuple[str, list[str]]]:
    found = re.findall(r"```console\n(\$ python train.py\n.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    parts = [part.partition("\n") for part in found[0].removeprefix("$ ").split("\n$ ")]
    return [(command, masked(lines)) for command, _, lines in parts]


def printed_by(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return masked(done.stderr) + masked(done.stdout)


@pytest.mark.parametrize("torchrun", ["its variables", pytest.param("itself", marks=pytest.mark.sweep)])
def test_the_transcript(torchrun: str, tmp_path: Path, forks: Forks) -> None:
    """`python train.py` twice, torchrun twice, `unipar runs` and `unipar report`, in one folder."""
    for language, name in (("python", "train.py"), ("yaml", "train.yaml")):
        (text,) = re.findall(rf"```{language}\n(# {re.escape(name)}\n.*?)```", README, re.DOTALL)
        (tmp_path / name).write_text(text.replace("steps: 200", "steps: 40"), encoding="utf-8")

    def run_torchrun(words: list[str]) -> list[str]:
        if torchrun == "itself":
            command, made = in_private_network(["torchrun", *words]), environment(tmp_path)
            return printed_by(
                subprocess.run(
                    command, cwd=tmp_path, env=made, capture_output=True, text=True, check=False, timeout=300
                )
            )
        first, second = forks.ranks(words[-1:], tmp_path)
        assert masked(second.stdout) == masked(first.stdout)
        return printed_by(first)

    run: dict[str, Callable[[list[str]], list[str]]] = {
        "python": lambda words: printed_by(forks.python(words, tmp_path)),
        "unipar": lambda words: printed_by(forks.python(["-m", "unipar", *words], tmp_path)),
        "torchrun": run_torchrun,
    }
    commands = [command for command, _ in transcript()]
    again = "torchrun --standalone --nproc-per-node 2 train.py"
    assert commands == ["python train.py", "python train.py", again, again, "unipar runs", "unipar report"]
    for command, shown in transcript():
        program, *words = command.split()
        check_shown(shown, run[program](words))
