"""Modes before the first step: what is put into training mode, what stays in eval mode, and the line that says so."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from typing_extensions import override

from unipar.model.modes import enter_training_mode


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))


def in_eval(module: nn.Module) -> list[str]:
    return [name for name, inner in module.named_modules() if not inner.training]


def test_a_model_in_training_mode_is_left_as_it_is() -> None:
    """No module is changed, and there is no line."""
    model = layers()
    modes = enter_training_mode(model)
    assert (modes.woken, modes.changed, modes.left, modes.describe()) == ((), 0, 0, "")
    assert in_eval(model) == []


def test_a_model_in_eval_mode_trains() -> None:
    """from_pretrained returns a model so: all of it is put into training mode, frozen layers too."""
    model = layers().eval()
    model[0].requires_grad_(False)
    modes = enter_training_mode(model)
    assert in_eval(model) == []
    assert modes.woken == ("",)
    assert modes.describe() == "4 modules that model() returned in eval mode"


def test_a_pretrained_model_inside_another_trains() -> None:
    """A wrapper such as peft's is in training mode, and the model inside it is not."""
    model = nn.ModuleDict({"base": layers().eval(), "head": nn.Linear(2, 2)})
    modes = enter_training_mode(model)
    assert in_eval(model) == []
    assert modes.woken == ("base",)


def test_a_frozen_teacher_stays_in_eval_mode() -> None:
    """Its dropout is never woken; the line counts its modules, beside those of the student."""
    model = nn.ModuleDict({"student": layers().eval(), "teacher": layers().requires_grad_(False).eval()})
    modes = enter_training_mode(model)
    assert in_eval(model) == ["teacher", "teacher.0", "teacher.1", "teacher.2"]
    assert modes.trained == ()
    assert modes.describe() == (
        "4 modules that model() returned in eval mode; 4 stay in eval mode, all frozen: teacher"
    )


def test_a_norm_with_fixed_statistics_stays_in_eval_mode() -> None:
    """A single layer was put into eval mode by hand; the line says that it is trained."""
    model = layers()
    model[2].eval()
    modes = enter_training_mode(model)
    assert in_eval(model) == ["2"]
    assert modes.describe() == "1 stays in eval mode, not frozen: 2"


def test_a_task_keeps_its_modes() -> None:
    """With keep, nothing is changed, and the line says what is trained in eval mode."""
    model = layers().eval()
    modes = enter_training_mode(model, keep=True)
    assert len(in_eval(model)) == 4
    assert modes.describe() == "4 stay in eval mode, not frozen: 0, 2"


def test_the_models_own_train_decides() -> None:
    """A model that keeps a part of itself in eval mode does so in its own train()."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        @override
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.layers[2].eval()
            return self

    model = Fixed().eval()
    modes = enter_training_mode(model)
    assert in_eval(model) == ["layers.2"]
    assert modes.describe() == (
        "4 modules that model() returned in eval mode; 1 stays in eval mode, not frozen: layers.2"
    )


def test_lora_over_a_pretrained_model_trains_with_dropout() -> None:
    """get_peft_model leaves the base in eval mode inside a wrapper in training mode."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(layers().eval(), peft.LoraConfig(target_modules=["0"], lora_dropout=0.1))
    assert model.training
    assert "base_model.model.1" in in_eval(model)
    enter_training_mode(model)
    assert in_eval(model) == []
