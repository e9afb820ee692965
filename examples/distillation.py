"""Frozen teacher in the loss of a student, on scikit-learn's digits: `unipar run configs/distillation.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from digits import Digits, Images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unipar


def called(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


class Distillation(unipar.Task):
    def __init__(self, channels: int = 4, teacher: int = 32, teacher_steps: int = 72, temperature: float = 3.0) -> None:
        self.student, self.teacher = Digits(channels), Digits(teacher)
        self.teacher_steps, self.temperature = teacher_steps, temperature

    def model(self) -> dict[str, Any]:
        return {"student": self.student.model(), "teacher": self.teacher.model()}

    def data(self) -> TensorDataset:
        return self.student.data()

    def validation(self) -> TensorDataset:
        return self.student.validation()

    def train(self, run: unipar.Run) -> None:
        self.run = run
        for local_batch in run.batches():
            if run.done < self.teacher_steps:
                run.step(local_batch, part="teacher", loss=self.teacher.loss)
            else:
                run.step(local_batch, part="student")

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        """Return how far the student is from the labels and from the softened probabilities of the frozen teacher."""
        images, labels = batch
        guess, taught, t = model(images), self.run.frozen("teacher")(called, images), self.temperature
        soft = F.kl_div(F.log_softmax(guess / t, -1), F.softmax(taught / t, -1), reduction="batchmean")
        return (F.cross_entropy(guess, labels) + t**2 * soft) / 2

    def metrics(self, model: nn.Module, batch: Images) -> dict[str, Tensor]:
        images, labels = batch
        taught = self.run.frozen("teacher")(called, images)
        student = self.student.metrics(model, batch)
        return {"student": student["accuracy"], "teacher": (taught.argmax(-1) == labels).float().mean()}


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "distillation.yaml"
    print(unipar.launch(config, task=Distillation, overwrite="--overwrite" in sys.argv))
