"""Images of `run.log`: what is taken, the PNG files of a run, and what trackers and the page have of them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.running import Line, running
from unipar.errors import TaskError
from unipar.report.build import write_run_page
from unipar.results.run_report import Report
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.tracking.images import pixels_of
from unipar.tracking.png import encode_png, png_size
from unipar.tracking.writer import TrackerWriter


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
def test_a_png_file_is_what_others_read(channels: int, mode: str) -> None:
    """PIL reads the same bytes, as many as the image has, row by row."""
    pixels = torch.randint(0, 256, (5, 7, channels), dtype=torch.uint8)
    png = encode_png(pixels.numpy().tobytes(), (5, 7, channels))
    with Image.open(io.BytesIO(png)) as image:
        assert (image.mode, image.size, png_size(png)) == (mode, (7, 5), (7, 5))
        assert image.tobytes() == pixels.numpy().tobytes()


def test_what_is_taken_for_an_image() -> None:
    """Arrays and tensors with and without channels, floats from 0 to 1, images of PIL; a single number is none."""
    grey = [[[0], [128]], [[255], [64]]]
    floats = torch.tensor(grey) / 255
    for value in (torch.tensor(grey, dtype=torch.uint8), floats, floats.squeeze(2), floats.double().numpy()):
        pixels = pixels_of("x", value)
        assert pixels is not None
        assert (pixels.dtype, pixels.tolist()) == (torch.uint8, grey)
    turned = pixels_of("x", Image.fromarray(np.array(grey, np.uint8)[:, :, 0]).convert("P"))
    assert turned is not None
    assert turned.tolist() == [[[v, v, v, 255] for (v,) in row] for row in grey]
    assert pixels_of("x", torch.full((1, 2, 3), 0.5, dtype=torch.bfloat16, requires_grad=True)) is not None
    for number in (1, 0.5, True, torch.tensor(2.0), torch.ones(1, 1), np.float32(3)):
        assert pixels_of("x", number) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            torch.zeros(3, 8, 9),
            "run.log(x=...) got a tensor of shape [3, 8, 9]; it takes numbers, and images of height x width x "
            "channels, 1 to 4 channels; permute(1, 2, 0) puts channels last",
        ),
        (
            torch.zeros(5),
            "run.log(x=...) got a tensor of shape [5]; it takes numbers, and images of height x width x channels, 1 to "
            "4 channels",
        ),
        (
            np.zeros((0, 4, 3)),
            "run.log(x=...) got a tensor of shape [0, 4, 3]; it takes numbers, and images of height x width x "
            "channels, 1 to 4 channels",
        ),
        (
            torch.zeros(4, 4, 3, dtype=torch.int64),
            "run.log(x=...) got an image of int64; it takes uint8, and floats from 0 to 1",
        ),
        (
            torch.linspace(-1, 2, 16).view(4, 4),
            "run.log(x=...) got an image of floats from -1 to 2; they must be from 0 to 1: scale it, or cut it off by "
            "clamp(0, 1)",
        ),
        (
            np.full((4, 4), np.nan),
            "run.log(x=...) got an image of floats from nan to nan; they must be from 0 to 1: scale it, or cut it off "
            "by clamp(0, 1)",
        ),
    ],
)
def test_what_is_none(value: Any, said: str) -> None:
    """A sentence with its shape, type or range, and the way out."""
    with pytest.raises(TaskError) as e:
        pixels_of("x", value)
    assert str(e.value) == said


@pytest.mark.filterwarnings("ignore")  # libraries' own
def test_what_a_run_keeps_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file by name and step, which the report, the page, TensorBoard, W&B and MLflow show; numbers stay numbers."""
    for name in ("WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    with running(Line(), tmp_path, log={"every": 1, "to": ["tensorboard", "wandb", "mlflow"]}) as run:
        for local_batch in run.batches():
            run.step(local_batch)
            run.log(**{"two words": torch.full((2, 3, 3), run.done * 50, dtype=torch.uint8), "lamps": run.done})
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [row for row in rows if row["event"] == "tracker"] == []
    report = Report.read(tmp_path)
    files = [(step, tmp_path / "images" / f"two_words-{step:08d}.png") for step in (1, 2, 3)]
    assert report.images == [(step, {"two words": file}) for step, file in files]
    assert report.logs == [(step, {"lamps": step}) for step in (1, 2, 3)]
    with Image.open(files[1][1]) as image:
        assert (image.size, image.getpixel((0, 0))) == ((3, 2), (100, 100, 100))
    _tensorboard_has(tmp_path, [(step, file.read_bytes()) for step, file in files])
    media = "wandb/offline-run-*/files/media/images/log/two words_{}_*.png"
    for place in (media, "mlflow/*/artifacts/images/log~two words+step+{}+*.png"):
        for step in (1, 2, 3):
            found = list(tmp_path.glob(place.format(step)))
            assert len(found) == 1, (place, step)
            with Image.open(found[0]) as image:
                assert image.convert("RGB").getpixel((0, 0)) == (step * 50,) * 3
    page = write_run_page(tmp_path).read_text("utf-8")
    for step, file in files:
        assert (
            f'alt="two words, step {step}" src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"'
            in page
        )


def _tensorboard_has(run: Path, images: list[tuple[int, bytes]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    kept = [(e.step, e.encoded_image_string, e.width, e.height) for e in events.Images("log/two words")]
    assert kept == [(step, png, 3, 2) for step, png in images]


def test_other_ranks_keep_none(tmp_path: Path) -> None:
    """Rank 0's images alone are kept."""
    writer = TrackerWriter((), tmp_path, 1)
    assert writer.keep_image(1, "x", torch.zeros(2, 2, 3, dtype=torch.uint8)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_page_shows_six_of_many_and_says_which_file_is_gone(tmp_path: Path) -> None:
    """The first and the last are among them."""
    with running(
        Line(), tmp_path, log={"every": 1}, train={"steps": 11, "optimizer": {"name": "sgd", "lr": 1e-3}}
    ) as run:
        for local_batch in run.batches():
            run.step(local_batch)
            run.log(dot=np.zeros((2, 2)))
    (tmp_path / "images" / "dot-00000011.png").unlink()
    page = write_run_page(tmp_path).read_text("utf-8")
    assert [step for step in range(1, 12) if f'alt="dot, step {step}"' in page] == [1, 3, 5, 7, 9]
    assert "<figcaption>step 11: dot-00000011.png is gone</figcaption>" in page
    assert f"6 of 11; all are in {tmp_path / 'images'}." in page
