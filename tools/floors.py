"""Floors of the packages of unipar, as data: a package imports and calls what is on floors below its own."""

from __future__ import annotations

FLOORS: list[set[str]] = [
    {"errors"},
    {"utils"},
    {"run_folder", "distributed", "config", "tracking"},
    {"prediction"},
    {"backend", "data", "optimizers"},
    {"engines", "model", "task", "memory", "profiling", "checkpoint"},
    {"planning"},
    {"training", "results"},
    {"report"},
    {"launcher", "conversion", "jobs", "calibration"},
    {"comparison", "verification", "observing"},
    {"cli"},
]

BACKENDS = 6.5
"""Floor of `backends/`: it may import floors 1 to 6, and `training` calls it."""


def floor_of(file: str) -> float | None:
    """Return the floor of a file, named from the repository's root; None for a file that is on no floor."""
    folder, _, rest = file.partition("/")
    if folder == "backends":
        return BACKENDS
    package = rest.split("/")[0].removesuffix(".py")
    return next((float(i) for i, packages in enumerate(FLOORS) if folder == "unipar" and package in packages), None)
