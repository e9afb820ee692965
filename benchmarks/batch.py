"""Effect on training of a batch eight times as large, and of learning rates scaled to it: docs/one-gpu-to-many.md.

python -m benchmarks.batch            # takes some minutes; the digits of scikit-learn, in one process
python -m benchmarks.batch --epochs 1 --seeds 1
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unipar

CONFIG = Path(__file__).parents[1] / "configs" / "digits.yaml"
IMAGES, SMALL, LARGE, RATE, WARMUP = 1500, 32, 256, 0.05, 10


@dataclass(frozen=True)
class Way:
    """Batch size and change of the learning rate, which was chosen for 32 samples."""

    name: str
    total: int
    changes: Mapping[str, Any]


LINEAR, SQRT = ({"rule": rule, "base_batch_size": SMALL} for rule in ("linear", "sqrt"))
WAYS = (
    Way("32, the rate as chosen", SMALL, {}),
    Way("256, the same rate", LARGE, {}),
    Way("256, sqrt", LARGE, {"train.lr_scale": SQRT}),
    Way("256, linear", LARGE, {"train.lr_scale": LINEAR}),
    Way(f"256, sqrt, warm-up of {WARMUP}", LARGE, {"train.lr_scale": SQRT, "train.schedule.warmup": WARMUP}),
    Way(f"256, linear, warm-up of {WARMUP}", LARGE, {"train.lr_scale": LINEAR, "train.schedule.warmup": WARMUP}),
)


@dataclass(frozen=True)
class TrainingResult:
    """Validation loss and accuracy after a training."""

    steps: int
    loss: float
    accuracy: float


def train_once(way: Way, epochs: int, seed: int, out: str, rate: float = RATE) -> TrainingResult:
    """Return the validation loss and accuracy after `epochs` passes; a loss that is not finite counts as infinite."""
    steps = epochs * -(-IMAGES // way.total)
    settings: dict[str, Any] = {
        "backend": "single",
        "parallel.data": 1,
        "batch.total": way.total,
        "train.epochs": epochs,
        "train.seed": seed,
        "train.optimizer.lr": rate,
        "train.optimizer.nesterov": False,
        "eval.every": steps,
        "out": out,
    }
    try:
        report = unipar.launch(CONFIG, overrides={**settings, **way.changes}, overwrite=True, quiet=True)
    except unipar.NonFinite:
        return TrainingResult(steps, float("inf"), 0.1)
    _, means = report.evals[-1]
    return TrainingResult(steps, means["loss"], means["accuracy"])


def result_rows(epochs: int, seeds: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| batch and rate | steps | loss, median of the seeds | lowest to highest | accuracy |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            results = [train_once(way, epochs, seed, f"{folder}/run") for seed in range(seeds)]
            losses = [r.loss for r in results]
            median = statistics.median(losses)
            accuracy = statistics.median(r.accuracy for r in results)
            span = f"{min(losses):.3f} to {max(losses):.3f}"
            yield f"| {way.name} | {results[0].steps} | {median:.3f} | {span} | {100 * accuracy:.1f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for row in result_rows(arguments.epochs, arguments.seeds):
        print(row, flush=True)


if __name__ == "__main__":
    main()
