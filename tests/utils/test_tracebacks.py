"""Places in the user's code: of errors in it, of errors in libraries that it calls, of processes of a DataLoader."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from unipar.run_folder.error_file import read_error, write_error
from unipar.utils.tracebacks import is_user_file, user_place_of

SCRIPT = """
import torch
from torch.utils.data import DataLoader

class Samples:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        raise ValueError("bad sample")

def own(): raise ValueError("bad value")
def torchs(): return torch.ones(2, 3) @ torch.ones(2, 3)
def called(call): return call()
def workers(): return list(DataLoader(Samples(), num_workers=1))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Functions of a script in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    functions: dict[str, Any] = {}
    exec(compile(SCRIPT, str(tmp_path / "train.py"), "exec"), functions)
    return functions


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as e:  # noqa: PT011 - of any kind
        call()
    error = e.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this file, which is the user's too
    return error


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("own", "ValueError: bad value (train.py:11, in own)"),
        ("torchs", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3) (train.py:12, in torchs)"),
        ("workers", "ValueError: bad sample, in DataLoader worker process 0 (train.py:9, in __getitem__)"),
    ],
)
def test_a_recorded_error_ends_with_its_place(script: dict[str, Any], tmp_path: Path, name: str, line: str) -> None:
    """The innermost frame in the user's code is named, also for errors in torch, and in processes that read data."""
    write_error(tmp_path, 0, raised(script[name]))
    error = read_error(tmp_path, 0)
    assert error is not None
    assert error.line == line


def test_a_recorded_traceback_begins_in_the_users_code(script: dict[str, Any], tmp_path: Path) -> None:
    """Frames above it, of what called it, are left out; those below it stay."""

    class Model(torch.nn.Module):
        @override
        def forward(self) -> None:
            script["called"](script["own"])

    error = raised(Model().__call__)
    assert "module.py" in "".join(traceback.format_exception(error))
    write_error(tmp_path, 0, error)
    recorded = read_error(tmp_path, 0)
    assert recorded is not None
    assert "module.py" not in recorded.traceback
    assert recorded.traceback.count("  File ") == 3


def test_whose_a_file_is() -> None:
    """Packages, the standard library, unipar and its backends are not the user's; this file is."""
    import unipar_native

    assert is_user_file(__file__)
    files = [torch.__file__, traceback.__file__, user_place_of.__code__.co_filename, unipar_native.__file__, "<string>"]
    assert [file for file in files if is_user_file(str(file))] == []
