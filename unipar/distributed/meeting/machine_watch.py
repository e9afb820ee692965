"""`MachineWatch`: what a rank learns of the others' failures, and the sentence with which all ranks then end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

from unipar.distributed.meeting.links import RankLink
from unipar.distributed.world_machines import name_ranks

if TYPE_CHECKING:
    from unipar.distributed.meeting.world_session import Session

SECONDS_TO_RAISE: Final = 5.0
"""Seconds in which a rank that knows of a failure may raise an error by itself, and then is ended."""

SECONDS_TO_LEARN: Final = 5.0
"""Seconds that a rank whose peer is gone waits to learn why."""


@final
class MachineWatch:
    """Watch of one rank over the ranks of its world, which are on several machines.

    The first failure that reaches rank 0 is the cause: of a rank that has raised an error, or of one whose link is
    lost. Rank 0 tells it to all. A rank that has lost the way to rank 0 tells what it knows to those below it.
    """

    def __init__(
        self, session: Session, silence: float, silence_key: str, end: Callable[[dict[str, Any]], None]
    ) -> None:
        """`silence`: seconds without a sign of a machine, named by the config's key; `end` ends this process."""
        assert session.tree is not None
        self._rank, self._machines = session.place.rank, session.machines
        self._tree, self._links, self._launch = session.tree, session.tree.links, session.next_launch()
        self._silence, self._silence_key, self._end = silence, silence_key, end
        self.step: Callable[[], int] = lambda: 0
        """Function that returns how many steps this rank has done."""

        self.failures: list[dict[str, Any]] = []
        """On rank 0: errors that other ranks have raised, the first one first."""

        self._cause: dict[str, Any] | None = None
        self._known = threading.Event()
        self._raised = threading.Event()
        self._lock = threading.Lock()
        self._links.set_patience(silence)
        self._tree.begin_watch(self._launch, self)

    def take(self, link: RankLink, message: dict[str, Any]) -> None:
        """Learn of a failure from a rank that this one is linked to."""
        if "cause" in message:
            self._learn(message["cause"])
        else:
            self._report(message["failure"])

    def lost(self, link: RankLink, why: OSError | None) -> None:
        """Report a rank whose link is lost: its process or its machine has ended, or there is no way to it."""
        machine = self._machines.of(link.rank)
        same = self._machines.of(self._rank) == machine
        silent = isinstance(why, TimeoutError) or (why is not None and why.errno in (110, 113, 101))
        who = name_ranks((link.rank,) if same or not silent else machine.ranks)
        if silent:
            how = (
                f"nothing was heard of it for {self._silence:g} s ({self._silence_key}): is the machine up, and is "
                "there a way to it?"
            )
        else:
            how = f"its connection was {'reset' if why is not None else 'closed'}; its own log may say why"
        sentence = f"{machine}, {who}, was lost {self._when()}: {how}"
        self._report({"rank": link.rank, "kind": "WorkerFailed", "message": sentence, "lost": True})

    def _when(self) -> str:
        step = self.step()
        return f"after step {step}" if step else "before the first step"

    def _report(self, failure: dict[str, Any]) -> None:
        """Pass a failure on to rank 0; it is the cause for those that have no way there."""
        if self._rank == 0:
            if not failure.get("lost"):
                self.failures.append(failure)
            self._learn(failure)
        elif not self._links.send_up({"launch": self._launch, "failure": failure}) or self._is_above(failure["rank"]):
            self._learn(failure)

    def _is_above(self, rank: int) -> bool:
        return self._links.parent is not None and self._links.parent.rank == rank

    def _learn(self, cause: dict[str, Any]) -> None:
        with self._lock:
            if self._cause is not None:
                return
            self._cause = cause
        self._links.send_down({"launch": self._launch, "cause": cause})
        self._known.set()
        self._tree.fail()
        threading.Thread(target=self._end_late, name="end of a lost world", daemon=True).start()

    def _end_late(self) -> None:
        """End this process if it does not raise an error by itself: it may wait for a rank that is gone."""
        if not self._raised.wait(SECONDS_TO_RAISE):
            assert self._cause is not None
            self._end(self._cause)

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell the others of an error of this rank, which is not the consequence of another's."""
        self._raised.set()
        mine = {**failure, "rank": self._rank}
        self._report(mine)
        self._learn(mine)  # at once: this rank may be the way of others to rank 0

    def cause(self) -> dict[str, Any] | None:
        """Return the failure that has ended the world, once it is known; None if it does not become known in time."""
        self._raised.set()
        self._known.wait(SECONDS_TO_LEARN)
        return self._cause

    def close(self) -> None:
        """End the watch: this rank is done, or has failed and told so."""
        self._raised.set()
        if self._rank == 0 and self._cause is not None:
            time.sleep(0.2)  # so that what was sent is read before the links go
        self._tree.end_watch(self._launch)
