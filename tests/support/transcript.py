"""Pages of docs/ that are played: their files are written, their commands run, and what is printed is compared."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.forks import Forks

MEASURED = (
    r"[\d,.]+ samples/s",
    r"[\d.e+]+ [kMGTP]FLOP/s",
    r"\d+(\.\d+)? (s|ms|us)\b|\d+:\d\d(:\d\d)?|\d+ min \d\d s",
    r"\d+(\.\d+)? (B|KiB|MiB|GiB)\b",
)
"""Figures of a machine: times, speeds and sizes."""

SAVED = " saved # in "
"""What a line on a checkpoint has, once it is masked."""

NUMBER = r"\[?\b\d[\d,.]*(\.\.[\d.]+)?(\b|\])"
"""Any number, and the middle half of times."""


def masked(text: str, masks: Sequence[str] = MEASURED) -> list[str]:
    """Return the lines without what the masks match, and without what torch's launcher and sockets remark."""
    for pattern in masks:
        text = re.sub(pattern, "#", text)
    lines = [re.sub(" +", " ", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not re.match(r"\[?[WI]\d{4} ", line)]


def numberless(text: str) -> list[str]:
    """Return the lines without measures, numbers and the sentence on the best strategy, which are a machine's own."""
    text = re.sub(r"(agrees? with one process to [^;\n]*);.*?\.\n\n", r"\1\n\n", text, flags=re.DOTALL)
    return masked(text, (*MEASURED, r"-?\d[\d.,]*e[+-]\d+", NUMBER))


def check_shown(shown: Sequence[str], printed: Sequence[str]) -> None:
    """Raise AssertionError if the lines are not those that were printed; `...` stands for one or more lines.

    Checkpoints are saved beside the steps that follow, so the lines on them may come later than the page shows.
    """
    saved = [line for line in shown if SAVED in line]
    assert [line for line in saved if saved.count(line) > printed.count(line)] == []
    shown = [line for line in shown if SAVED not in line]
    printed = [line for line in printed if SAVED not in line]
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    first, *others = parts
    assert list(printed[: len(first)]) == first
    rest = list(printed[len(first) :])
    if not others:
        assert rest == []
        return
    *middle, last = others
    for part in middle:
        begin = next((i for i in range(1, len(rest)) if rest[i : i + len(part)] == part), None)
        assert begin is not None, f"{part} is not in {rest}"
        rest = rest[begin + len(part) :]
    assert rest[len(rest) - len(last) :] == last
    assert len(rest) > len(last)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


@dataclass(frozen=True)
class Shown:
    """A command of a page, and what the page shows of its output."""

    command: str
    output: str

    @property
    def fails(self) -> bool:
        """Whether the page shows an error of unipar."""
        return self.output.startswith("unipar: ")


def blocks(page: str) -> Iterator[Block]:
    """Return the fenced blocks of a page, in order."""
    for language, text in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL):
        yield Block(language, text)


def commands(block: Block) -> list[Shown]:
    """Return the commands of a console block, each with its output; a line that ends with a backslash goes on."""
    parts = block.text.replace("\\\n", " ").removeprefix("$ ").split("\n$ ")
    return [Shown(re.sub(" +", " ", first), rest) for first, _, rest in (part.partition("\n") for part in parts)]


def changed(text: str, diff: str) -> str:
    """Return a text in which the lines of a diff that begin with a minus are replaced by those with a plus.

    Lines that follow one another in the diff belong together: a minus after a plus begins another change.
    """
    for change in re.findall(r"(?:^-.*\n)+(?:^\+.*\n)*", diff, re.MULTILINE):
        gone, come = ("".join(f"{line[1:]}\n" for line in change.splitlines() if line[:1] == sign) for sign in "-+")
        assert text.count(gone) == 1, gone
        text = text.replace(gone, come)
    return text


def change_file(file: Path, diff: str) -> None:
    """Change a file by a diff."""
    file.write_text(changed(file.read_text("utf-8"), diff), encoding="utf-8")


def played(page: str, folder: Path, forks: Forks) -> Iterator[tuple[Shown, str]]:
    """Write the files of a page and run its commands of unipar, in its order; return what each printed.

    A block whose first line is `# NAME` is that file; a block of language `json` is ds_config.json; a diff changes the
    last file of Python.
    """
    script = folder / "train.py"
    for block in blocks(page):
        match block.language:
            case "python" | "yaml":
                name = block.text.partition("\n")[0].removeprefix("# ")
                (folder / name).write_text(block.text, encoding="utf-8")
                script = folder / name if block.language == "python" else script
            case "json":
                (folder / "ds_config.json").write_text(block.text, encoding="utf-8")
            case "diff":
                change_file(script, block.text)
            case "console":
                for shown in commands(block):
                    done = run_unipar(shown.command, folder, forks)
                    assert (done.returncode != 0) == shown.fails, (shown.command, done.stderr)
                    yield shown, done.stderr + done.stdout
            case _:
                pass


def run_unipar(command: str, folder: Path, forks: Forks) -> subprocess.CompletedProcess[str]:
    """Return what a command of unipar printed; a plan is printed 110 columns wide."""
    program, *words = shlex.split(command)
    assert program == "unipar", command
    wide = {"COLUMNS": "110"} if words[0] == "plan" else {}
    return forks.python(["-m", "unipar", *words], folder, wide, memory=words[0] == "compare")
