"""Python values as JSON and tensors, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unipar.checkpoint.packed_values import pack_values, unpack_values


def test_values_come_back_as_they_were() -> None:
    """Tuples, NumPy's arrays, bytes, infinite numbers, keys that are no text, and unipar's own words."""
    value: dict[Any, Any] = {
        "a": (1, [2.5, None, True]), 7: np.arange(3, dtype=np.int16), "b": {"unipar tensor": "no"}, "c": -float("inf"),
        "d": b"\x01", "e": torch.ones(2, dtype=torch.bfloat16), "f": np.float32(0.1),
    }  # fmt: skip
    packed, tensors = pack_values(value, "it", "called", exact=True)
    back = unpack_values(packed, tensors.__getitem__)
    assert list(back) == list(value)
    assert back["a"] == value["a"]
    assert back[7].dtype == np.int16
    assert back[7].tolist() == [0, 1, 2]
    assert (back["b"], back["c"], back["d"]) == ({"unipar tensor": "no"}, -float("inf"), b"\x01")
    assert torch.equal(back["e"], value["e"])
    assert back["f"] == np.float32(0.1)
