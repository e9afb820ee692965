"""Images of `run.log`: checked, and kept as PNG files in the run folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.errors import TaskError
from unipar.tracking.png import COLOUR_TYPES, encode_png
from unipar.utils.files import write_file_atomically

if TYPE_CHECKING:
    from torch import Tensor


def pixels_of(name: str, value: Any) -> Tensor | None:
    """Return an image that was given to `run.log` as `name`: uint8, height x width x channels; None if it is a number.

    Raise TaskError if it is neither.
    """
    import numpy as np
    import torch

    if hasattr(value, "getbands"):  # an image of PIL
        value = np.array(value if value.mode in ("L", "LA", "RGB", "RGBA") else value.convert("RGBA"))
    if not isinstance(value, torch.Tensor | np.ndarray) or value.shape.count(1) == len(value.shape):
        return None
    image = torch.as_tensor(value).detach().cpu()
    shape = list(image.shape)
    image = image.unsqueeze(2) if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[2] not in COLOUR_TYPES or not image.numel():
        turn = "; permute(1, 2, 0) puts channels last" if len(shape) == 3 and shape[0] in COLOUR_TYPES else ""
        raise TaskError(
            f"run.log({name}=...) got a tensor of shape {shape}; it takes numbers, and images of height x width x "
            f"channels, 1 to 4 channels{turn}"
        )
    if image.dtype is torch.uint8:
        return image.contiguous()
    if not image.is_floating_point():
        kind = str(image.dtype).removeprefix("torch.")
        raise TaskError(f"run.log({name}=...) got an image of {kind}; it takes uint8, and floats from 0 to 1")
    low, high = float(image.min()), float(image.max())
    if not 0 <= low <= high <= 1:  # so it is with nan, too
        raise TaskError(
            f"run.log({name}=...) got an image of floats from {low:g} to {high:g}; they must be from 0 to 1: scale it, "
            "or cut it off by clamp(0, 1)"
        )
    return (image.double() * 255).round().to(torch.uint8).contiguous()


def save_image(folder: Path, step: int, name: str, pixels: Tensor) -> Path:
    """Write an image into a folder, and return its file."""
    height, width, channels = pixels.shape
    folder.mkdir(exist_ok=True)
    file = folder / f"{re.sub('[^A-Za-z0-9_-]', '_', name)}-{step:08d}.png"
    write_file_atomically(file, encode_png(pixels.numpy().tobytes(), (height, width, channels)))
    return file
