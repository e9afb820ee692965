"""Libraries that call an optimizer, and what their users do about a fault."""

from __future__ import annotations

import sys
import types

from unipar.observing.libraries import known_libraries, name_callers, way_out


def test_libraries_among_the_callers() -> None:
    """The outermost library comes first; modules of no known library are left out."""
    seen: list[tuple[str, ...]] = []
    inner = types.ModuleType("accelerate.optimizer")
    outer = types.ModuleType("transformers.trainer")
    vars(inner)["note"] = lambda: seen.append(name_callers(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]
    exec("def step(): note()", vars(inner))
    vars(outer)["step"] = inner.step
    exec("def train(): step()", vars(outer))
    outer.train()
    assert seen == [("transformers' Trainer", "Accelerate")]


def test_the_library_that_made_the_optimizers_class() -> None:
    """Horovod makes a class of its own of each optimizer."""
    made = type("SGD", (), {"__module__": "horovod.torch.optimizer"})()
    assert name_callers(None, [made]) == ("Horovod",)
    assert name_callers(None, [object()]) == ()


def test_every_fault_has_a_way_out() -> None:
    """Plain PyTorch's is the last resort."""
    assert "DistributedDataParallel" in way_out("unreduced gradients", ())
    assert "hvd.DistributedOptimizer" in way_out("unreduced gradients", ("Horovod",))
    assert way_out("no group", ("Horovod",)) == way_out("no group", ())


def test_known_libraries() -> None:
    """Those of backends come first, plain PyTorch last."""
    names = [library.name for library in known_libraries()]
    assert {"DeepSpeed", "Horovod", "Accelerate", "Lightning"} < {*names}
    assert names[-1] == "PyTorch"
