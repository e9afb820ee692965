"""Roll call: the ranks of a world on several machines find each other in its store, whoever wrote to it before.

A launcher may keep its store when it starts the ranks again, and each of its agents counts restarts for itself: what
an earlier attempt wrote must not be read as this one's. So each rank leaves a letter with a word that it has made up;
rank 0 answers each letter with the name of its session; and who gets an answer to his own word says so in a second
letter. When all have, the session begins: each is told of its neighbours, with whom it is then linked.
"""

from __future__ import annotations

import json
import secrets
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

from unipar.distributed.addresses import is_loopback
from unipar.distributed.meeting.neighbours import Neighbours
from unipar.distributed.meeting.text_rounds import result_of, tell_result
from unipar.distributed.world_machines import WorldMachines, name_ranks
from unipar.errors import WorldMismatch

if TYPE_CHECKING:
    import torch.distributed as dist

_LETTERS: Final = "letters"
_LONGEST_PAUSE: Final = 0.1


@dataclass(frozen=True)
class Presence:
    """Description that a rank gives of itself in the roll call."""

    machine: str
    """Key of its machine."""

    name: str
    """Host name."""

    address: str
    """Its machine's address, as far as it knows."""

    restarts: int = 0
    """Number of times that the launcher has started it again, as far as it was told."""


@final
@dataclass(frozen=True)
class RollCall:
    """Result of a roll call."""

    session: str
    """Name of the session, which no other attempt has."""

    neighbours: Neighbours
    restarts: int
    machines: WorldMachines | None = None
    """All machines, on rank 0."""


def call_roll(
    store: dist.Store, rank: int, size: int, mine: Presence, patience: float, own_address: Callable[[str], str]
) -> RollCall:
    """Return who is near, once all ranks are there; raise the same WorldMismatch on those that are, if some are not.

    `own_address` returns the address of rank 0's machine towards another machine's address.
    """
    if rank:
        return _answer(store, rank, mine, patience)
    session = secrets.token_hex(6)
    restarts = max(mine.restarts, store.add("attempts", 1) - 1)
    there = {0: mine, **_await_letters(store, size, session, mine, patience)}
    restarts = max(restarts, *(one.restarts for one in there.values()))
    elsewhere = next((one.address for one in there.values() if one.machine != mine.machine), None)
    if elsewhere is not None and is_loopback(mine.address):  # its own name is on loopback there, as on Debian
        here = own_address(elsewhere)
        there = {r: Presence(p.machine, p.name, here) if p.machine == mine.machine else p for r, p in there.items()}
    ranks = [there[r] for r in range(size)]
    machines = WorldMachines.of_ranks([p.machine for p in ranks], [p.name for p in ranks], [p.address for p in ranks])
    store.set(f"machines/{session}", _packed(machines.to_json()))
    near = [Neighbours.of_machine(machines, index) for index in range(len(machines.all))]
    begun = {
        there[one.here.ranks[0]].machine: json.dumps({"near": one.to_json(), "restarts": restarts}) for one in near
    }
    _begin(store, session, begun)
    return RollCall(session, near[0], restarts, machines)


def read_machines(store: dist.Store, roll: RollCall) -> WorldMachines:
    """Return all machines of a roll call, also on a rank that is not linked to the others; rank 0 tells each of them.

    `store`: that of the roll call.
    """
    return roll.machines or WorldMachines.from_json(_unpacked(store.get(f"machines/{roll.session}").decode()))


def _begin(store: dist.Store, session: str, begun: Mapping[str, str]) -> None:
    """Answer the ranks of each machine, by its key."""
    keys = [f"begin/{session}/{machine}" for machine in begun]
    store.multi_set(keys, list(begun.values()))  # pyright: ignore[reportAttributeAccessIssue] - not in stubs


def _await_letters(store: dist.Store, size: int, session: str, mine: Presence, patience: float) -> dict[int, Presence]:
    """Return what each other rank says of itself, once all have confirmed that they know the session."""
    came: dict[int, Presence] = {}
    confirmed: set[int] = set()
    last_number, until, pause = 0, time.monotonic() + patience, 0.002
    coming: list[int] = []
    while len(confirmed) < size - 1:
        numbered = store.add(_LETTERS, 0)
        coming += range(last_number + 1, numbered + 1)
        last_number = numbered
        letters = _read_letters(store, coming)
        if not letters:
            if time.monotonic() > until:
                sentence = _missing_sentence(size, confirmed, {0: mine, **came}, patience)
                _begin(store, session, {one.machine: json.dumps({"error": sentence}) for one in came.values()})
                raise WorldMismatch(sentence)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            continue
        pause = 0.002
        for letter in letters:
            rank = int(letter["rank"])
            if letter.get("session") == session:
                confirmed.add(rank)
            elif "word" in letter:  # or one of an earlier attempt: nobody waits for that answer
                came[rank] = Presence(**letter["presence"])
                confirmed.discard(rank)
        if words := [f"answer/{letter['word']}" for letter in letters if "word" in letter]:
            store.multi_set(words, [session] * len(words))  # pyright: ignore[reportAttributeAccessIssue] - not in stubs
    return came


def _read_letters(store: dist.Store, coming: list[int]) -> list[dict[str, Any]]:
    """Return the letters of these numbers that are there, and take them from the list: all in two requests, if all are.

    A number whose letter is not there yet is that of a rank that is about to write it, or was killed before it did.
    """
    keys = {number: f"{_LETTERS}/{number}" for number in coming}
    if not keys:
        return []
    if not store.check(list(keys.values())):
        keys = {number: key for number, key in keys.items() if store.check([key])}
    coming[:] = [number for number in coming if number not in keys]
    return [json.loads(text) for text in store.multi_get(list(keys.values()))] if keys else []


def _missing_sentence(size: int, confirmed: set[int], came: dict[int, Presence], patience: float) -> str:
    missing = [rank for rank in range(1, size) if rank not in confirmed]
    here: dict[str, list[int]] = {}
    for rank in sorted({0, *confirmed}):
        here.setdefault(came[rank].name, []).append(rank)
    there = "; ".join(f"{name}: {name_ranks(ranks)}" for name, ranks in here.items())
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{size - len(missing)} of {size} ranks have met within {patience:g} s (launch.rendezvous_timeout), and "
        f"{name_ranks(missing)} {verb} missing (here are {there}): was the launcher started on every machine, and is "
        "there a way from each to rank 0's (a firewall)?"
    )


def _answer(store: dist.Store, rank: int, mine: Presence, patience: float) -> RollCall:
    word, until = secrets.token_hex(6), time.monotonic() + patience
    _post(store, {"rank": rank, "word": word, "presence": vars(mine)})
    waited = (
        f"rank {rank} on {mine.name} has reached the meeting point and waited {patience:g} s "
        "(launch.rendezvous_timeout) for"
    )
    session = wait_for_key(store, f"answer/{word}", until, f"{waited} rank 0: it has ended, or was never started")
    _post(store, {"rank": rank, "session": session})
    late = f"{waited} the other ranks: rank 0's log says which"
    begun: dict[str, Any] = json.loads(wait_for_key(store, f"begin/{session}/{mine.machine}", until + 5, late))
    if "error" in begun:
        raise WorldMismatch(begun["error"])
    return RollCall(session, Neighbours.from_json(begun["near"]), begun["restarts"])


def _packed(value: Any) -> str:
    return b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(b64decode(text)))


def _post(store: dist.Store, letter: dict[str, Any]) -> None:
    store.set(f"{_LETTERS}/{store.add(_LETTERS, 1)}", json.dumps(letter))


def wait_for_key(store: dist.Store, key: str, until: float, sentence: str) -> str:
    """Return the value of a key once it is there; raise WorldMismatch with the sentence if it is not in time.

    The store says when it is there: thousands of ranks that ask again and again would keep it from its work.
    """
    if not _wait_for_keys(store, [key], until):
        raise WorldMismatch(sentence)
    return store.get(key).decode()


def _wait_for_keys(store: dist.Store, keys: list[str], until: float) -> bool:
    """Return whether these keys are there before `until`."""
    try:
        store.wait(keys, timedelta(seconds=max(0.001, until - time.monotonic())))
    except RuntimeError:
        return store.check(keys)
    return True


def _await_all(store: dist.Store, keys: list[str], until: float, patience: float) -> None:
    if not _wait_for_keys(store, keys, until):
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise WorldMismatch(
            f"rank 0 waited {patience:g} s for {name_ranks(late)}, which ended or hang; their logs may say why"
        )


def decide_together(
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    mine: str,
    judge: Callable[[list[str]], str],
    patience: float,
) -> str:
    """Return what `judge` on rank 0 makes of the texts of all ranks; an error that it raises is raised on all.

    `name` is new in the store. Each rank writes and reads one value, and rank 0 reads one of each.
    """
    until = time.monotonic() + patience
    store.set(f"{name}/{rank}", mine)
    if rank:
        sentence = f"rank {rank} waited {patience:g} s for rank 0, which has ended or hangs; its log may say why"
        answer: dict[str, str] = json.loads(wait_for_key(store, f"{name}/told", until, sentence))
        return result_of(answer)

    def judged() -> str:
        keys = [f"{name}/{one}" for one in range(size)]
        _await_all(store, keys, until, patience)
        return judge([text.decode() for text in store.multi_get(keys)])

    return tell_result(judged, lambda answer: store.set(f"{name}/told", json.dumps(answer)))
