"""`Tracker`: base class of trackers; lookup of a tracker by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from unipar.errors import ConfigError
from unipar.utils.entry_points import PluginGroup


class Tracker(ABC):
    """Base class of trackers. Name a subclass in the entry-point group `unipar.trackers`.

    Rank 0 creates one instance, and calls its methods, in a thread of its own.

    Examples:
        >>> class Lines(unipar.Tracker):
        ...     def __init__(self, run, config):
        ...         self.lines = []
        ...
        ...     def write(self, step, named):
        ...         self.lines.append((step, named))
        ...
        ...     def close(self):
        ...         pass
        >>> tracker = Lines(pathlib.Path("runs/train"), {})
        >>> tracker.write(1, {"loss": 0.5})
        >>> tracker.lines
        [(1, {'loss': 0.5})]
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """Modules that the tracker needs; import them in `__init__`."""

    hint: ClassVar[str] = ""
    """Command that installs the modules; empty: `pip install 'unipar[NAME]'`."""

    @abstractmethod
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        """Begin a run.

        Args:
            run: The run folder.
            config: All keys of the config as plain values.
        """

    def go_on(self, step: int) -> None:  # noqa: B027 - trackers from before need not have it
        """Go on as the tracker of a run that continues after `step` in the folder of an earlier attempt.

        It is called once, before the first `write`, and not for a run's first attempt. That attempt may have written
        steps after `step`, which come again: drop them, or leave out what comes again. A tracker without this method
        may show such steps twice.
        """

    @abstractmethod
    def write(self, step: int, named: Mapping[str, float]) -> None:
        """Write the metrics of one step.

        Args:
            step: The optimizer step, from 1.
            named: Values by name.
        """

    def write_image(self, step: int, name: str, file: Path) -> None:  # noqa: B027 - not every tracker shows images
        """Write an image of one step.

        Args:
            step: The optimizer step, from 1.
            name: Name of the image.
            file: A PNG in the run folder, which stays there.
        """

    @abstractmethod
    def close(self) -> None:
        """Write whatever is still buffered; no call follows."""


TRACKERS = PluginGroup[type[Tracker]](
    "unipar.trackers",
    "tracker",
    "log.to: {}",
    "a subclass of unipar.Tracker",
    Tracker,
    ConfigError,
    are_classes=True,
)


@cache
def find_tracker(name: str) -> type[Tracker]:
    """Return the tracker class for a name in `log.to`; the libraries that the class needs may be missing."""
    return TRACKERS.find(name)


def require_tracker(name: str) -> None:
    """Raise BackendNotInstalled unless the modules that the tracker needs are installed. They are not imported."""
    tracker = find_tracker(name)
    TRACKERS.require(name, tracker.requires, tracker.hint)
