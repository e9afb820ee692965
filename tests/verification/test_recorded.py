"""Files of what a rank has recorded: everything comes back as it was, however many tensors there are."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from unipar.verification.worker.recorded import SMALL, read_recorded, write_recorded


def test_everything_comes_back(tmp_path: Path) -> None:
    """Small tensors of several dtypes and shapes, a large one, and plain values, wherever they are."""
    large = torch.arange(SMALL + 1)
    scalar, empty, flags = torch.tensor(0.1, dtype=torch.float64), torch.zeros(2, 0), torch.tensor([True, False])
    half = torch.tensor([[1.5, -2.0], [3.0, 4.0]], dtype=torch.bfloat16).t()
    value = {
        "rows": [{"loss": 0.1, "t": scalar}, (half, "name", None, (empty,))],
        (0, "mask"): {"flags": flags, "large": large, "none": ()},
        "number": float("inf"),
    }
    write_recorded(value, tmp_path / "r")
    found = read_recorded(tmp_path / "r")
    assert list(found) == ["rows", (0, "mask"), "number"]
    assert (found["number"], found["rows"][0]["loss"], found["rows"][1][1:3]) == (float("inf"), 0.1, ("name", None))
    assert found[0, "mask"]["none"] == ()
    for mine, was in (
        (found["rows"][0]["t"], scalar),
        (found["rows"][1][0], half),
        (found["rows"][1][3][0], empty),
        (found[0, "mask"]["flags"], flags),
        (found[0, "mask"]["large"], large),
    ):
        assert (mine.dtype, mine.shape) == (was.dtype, was.shape)
        assert torch.equal(mine, was)


def test_small_tensors_are_written_together(tmp_path: Path) -> None:
    """A thousand of them are one in the file, which torch would read one by one."""
    write_recorded([torch.full((2, 3), float(i), requires_grad=True) for i in range(1000)], tmp_path / "r")
    with zipfile.ZipFile(tmp_path / "r") as archive:
        assert len([name for name in archive.namelist() if "/data/" in name]) == 2
    found = read_recorded(tmp_path / "r")
    assert [float(t[1, 2]) for t in found] == [float(i) for i in range(1000)]
    assert not any(t.requires_grad for t in found)


def test_what_is_no_plain_value_is_refused(tmp_path: Path) -> None:
    """No code can be in a file that is read."""
    with pytest.raises(ValueError, match="unmarshallable object"):
        write_recorded({"path": tmp_path}, tmp_path / "r")
