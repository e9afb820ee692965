"""Processes with an emulated device, forked from one that has imported torch and knows no device yet."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from tests.support.forks import MODELS, Forks
from tests.support.softcuda.emulation import ROOT, emulated_environment
from tests.support.softcuda.findings import REPORTS, DeviceFinding, read_findings

RESULT = "\nimport json\nprint('result ' + json.dumps(result))\n"


@dataclass(frozen=True)
class EmulatedRun:
    """What a piece of code left behind."""

    result: Any
    """Value of its variable `result`; None if it did not get there."""
    code: int
    stderr: str
    findings: tuple[DeviceFinding, ...]

    def texts(self, kind: str) -> list[str]:
        """Return the findings of one kind."""
        return [finding.text for finding in self.findings if finding.kind == kind]

    @property
    def error(self) -> str:
        """The last line of its traceback."""
        return self.stderr.strip().splitlines()[-1] if self.code else ""


@final
class EmulatedDevice:
    """A context manager: servers of such processes, and a folder for what they write.

    `profile`: the machine of a process that asks for none. Processes of one server have one kind of device.
    """

    def __init__(self, folder: Path, profile: str = "a100") -> None:
        self._folder, self._profile, self._open = folder, profile, ExitStack()
        # transformers imports torchao, which starts CUDA to learn which GPU there is: that does not survive a fork
        self._forks = Forks(environment=emulated_environment(profile), without=MODELS)

    def __enter__(self) -> Self:
        self._open.enter_context(self._forks)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(
        self, code: str, profile: str = "", *, variables: Mapping[str, str] | None = None, **changes: Any
    ) -> EmulatedRun:
        """Run code in a process; `changes` are those of the profile."""
        (run,) = self.ranks(code, profile, size=1, variables=variables, **changes)
        return run

    def ranks(
        self,
        code: str,
        profile: str = "",
        *,
        size: int = 2,
        timeout: float = 60.0,
        variables: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> list[EmulatedRun]:
        """Run code in a world of processes with torchrun's variables."""
        reports = Path(tempfile.mkdtemp(dir=self._folder))
        environment = {
            **emulated_environment(profile or self._profile, reports=reports, **changes),
            **(variables or {}),
        }
        words = ["-c", code + RESULT]
        if size == 1:
            done = [self._forks.python(words, reports, environment, timeout=timeout)]
        else:
            done = self._forks.ranks(words, reports, environment, size=size, timeout=timeout)
        findings = tuple(read_findings(reports))
        return [EmulatedRun(_result(p.stdout), p.returncode, p.stderr, findings) for p in done]

    def unipar(
        self,
        words: Sequence[str],
        profile: str = "",
        *,
        reports: Path | None = None,
        variables: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run `unipar WORDS...`."""
        environment = {**emulated_environment(profile or self._profile, **changes), **(variables or {})}
        if reports is not None:
            environment[REPORTS] = str(reports)
        return self._forks.unipar(words, environment)


def run_code(forks: Forks, code: str, folder: Path) -> Any:
    """Return the value of a piece of code's variable `result`, in a process without an emulated device."""
    done = forks.python(["-c", code + RESULT], folder, {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return _result(done.stdout)


def _result(stdout: str) -> Any:
    lines = [line for line in stdout.splitlines() if line.startswith("result ")]
    return json.loads(lines[-1].removeprefix("result ")) if lines else None
