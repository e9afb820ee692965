"""Examination of all machines of a launcher together: the first rank of each speaks for it, rank 0 judges."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from pydantic import TypeAdapter

from unipar.backend import registry
from unipar.distributed.addresses import resolve_host
from unipar.distributed.launchers import place_from_environment
from unipar.distributed.machine_checks import MachineCheck
from unipar.distributed.meeting.roll_call import decide_together, wait_for_key
from unipar.errors import UniparError, WorldMismatch
from unipar.launcher.preflight.facts import ConfigFacts, collect_facts, find_missing_interface, read_config_facts
from unipar.launcher.preflight.judging import ExaminedMachine, Findings, judge_machines
from unipar.launcher.preflight.network import NetworkFacts, compare_clocks, measure_all_reduce, open_port, try_ports
from unipar.launcher.preflight.outcome import Examination
from unipar.launcher.preflight.run_folder import FolderFacts, look_at_folder

if TYPE_CHECKING:
    import torch.distributed as dist

    from unipar.backend.checks import CheckedSource
    from unipar.distributed.place import Place
    from unipar.distributed.world_machines import WorldMachines

FINDINGS: Final = TypeAdapter(Findings)
EXAMINATION: Final = TypeAdapter(Examination)
"""As JSON, in which they go between the machines."""

_SECONDS_TO_MEET: Final = 600.0
"""Value of launch.rendezvous_timeout where no config can be read."""

_SECONDS_OF_STORE: Final = 120.0
_SECONDS_FOR_ALL: Final = 300.0
"""Seconds that a rank waits for all others to have looked at their machines."""

_SECONDS_TO_LEAVE: Final = 10.0
"""Seconds that rank 0 stays for the others to read the outcome, which is in its store."""


def place_under_launcher() -> Place | None:
    """Return this process's place in a world over several machines; None if no launcher started it."""
    place = place_from_environment(registry.list_launchers())
    if place is not None and not place.several_machines:
        raise WorldMismatch(
            f"doctor --across compares machines, and {place.launcher} has started ranks on this one alone: have it "
            "start one on each machine, or look at this machine with `unipar doctor`"
        )
    return place


def examine_across(
    place: Place, file: Path | None, out: str | None, show: Callable[[Examination], None]
) -> Examination:
    """Return what rank 0 finds about all machines; with a config, about the run's code, device and folder as well.

    Rank 0 calls `show` before any rank returns: the first one that exits with an error may have the launcher end all.
    """
    source, config = read_config_facts(file, out) if file is not None else (None, None)
    with ExitStack() as stack:
        examiner = _Examiner(place, source, config, stack)
        session, rank = examiner.session, place.rank
        answer = decide_together(
            session.store,
            rank,
            place.size,
            "examined",
            FINDINGS.dump_json(examiner.examine() if session.machines.leads(rank) else Findings()).decode(),
            lambda texts: json.dumps(
                judge_findings(place, session.machines, [*map(FINDINGS.validate_json, texts)]).to_json()
            ),
            _SECONDS_FOR_ALL,
        )
        outcome = EXAMINATION.validate_json(answer)
        if rank == 0:
            show(outcome)
        _leave(session.store, rank, place.size)
    return outcome


@final
class _Examiner:
    """Part of one machine in an examination, played by its first rank."""

    def __init__(
        self, place: Place, source: CheckedSource | None, config: ConfigFacts | None, stack: ExitStack
    ) -> None:
        from unipar.distributed.meeting.world_session import session_of

        self._config, self._source, self._stack = config, source, stack
        settings = source.config.machines if source is not None else None
        self._chosen = settings.interface if settings is not None else None
        at = place.address or place.server
        peer = resolve_host(at[0], said_by=place.launcher) if at is not None else "127.0.0.1"
        self._missing_interface = find_missing_interface(self._chosen, peer)
        if self._missing_interface:  # a check says so, when all have met
            self._chosen = None
        meet = source.config.launch.rendezvous_timeout if source is not None else _SECONDS_TO_MEET
        self.session = session_of(place, meet, _SECONDS_OF_STORE, self._chosen, linked=False)

    def examine(self) -> Findings:
        """Return all that this machine finds, or why it could not look.

        The first ranks of all machines do this together.
        """
        try:
            return self._examine()
        except Exception as e:  # the others are to be told, whatever it is
            return Findings(error=str(e) if isinstance(e, UniparError) else f"{type(e).__name__}: {e}")

    def _examine(self) -> Findings:
        from unipar.distributed.meeting.world_session import interface_for

        interface = interface_for(self.session, self._chosen)
        facts = collect_facts(interface, self._missing_interface, self._config)
        with open_port(self.session, "port"):
            ports = try_ports(self.session, "port")
            mine = {"open": set(ports.values()) == {"open"}, "source": self._source is not None}
            all_open, all_read = self._decide("ports", mine)
        ahead, uncertainty = compare_clocks(self._store("clock"), self._index, self._number)
        network = NetworkFacts(ports, ahead, uncertainty)
        if all_open:  # else the group would wait for its own timeout
            network = self._with_all_reduce(network, interface)
        return Findings(facts=facts, network=network, folder=self._look_at_folder() if all_read else None)

    @property
    def _index(self) -> int:
        return self.session.machines.index_of(self.session.place.rank)

    @property
    def _number(self) -> int:
        return len(self.session.machines.all)

    def _store(self, name: str) -> dist.Store:
        import torch.distributed as dist

        return dist.PrefixStore(name, self.session.store)

    def _decide(self, name: str, mine: dict[str, bool]) -> list[bool]:
        """Return for each of the values whether it is true on all machines."""
        answer = decide_together(
            self.session.store, self._index, self._number, name, json.dumps(mine), _all_true, _SECONDS_FOR_ALL
        )
        return list(json.loads(answer).values())

    def _with_all_reduce(self, network: NetworkFacts, interface: str | None) -> NetworkFacts:
        interface = interface if self._chosen or "GLOO_SOCKET_IFNAME" not in os.environ else None
        try:
            latency, bandwidth, size = measure_all_reduce(self._store("gloo"), self._index, self._number, interface)
        except RuntimeError as e:
            return replace(network, error=str(e).strip().splitlines()[0][:200])
        return replace(network, latency=latency, bandwidth=bandwidth, reduced=size)

    def _look_at_folder(self) -> FolderFacts:
        assert self._source is not None
        settings = self._source.config.machines
        wanted = settings.folder if settings is not None else "auto"
        return self._stack.enter_context(look_at_folder(self._store("folder"), self._index, self._source.out, wanted))


def _all_true(texts: list[str]) -> str:
    rows: list[dict[str, bool]] = [json.loads(text) for text in texts]
    return json.dumps({name: all(row[name] for row in rows) for name in rows[0]})


def judge_findings(place: Place, world: WorldMachines, facts: Sequence[Findings]) -> Examination:
    """Return what all machines' findings mean; those of ranks that do not speak for a machine are empty."""
    machines = world.all
    checks = [
        MachineCheck("examination", "fail", f"{machine}: {error}", "see to that first, and start it again")
        for machine in machines
        if (error := facts[machine.ranks[0]].error)
    ]
    if checks:
        return Examination(place.launcher, tuple(map(str, machines)), tuple(checks))
    times = Counter(machine.name for machine in machines)
    examined = [
        ExaminedMachine(
            name=str(machine) if times[machine.name] > 1 else machine.name,
            address=machine.address,
            **vars(facts[machine.ranks[0]]),
        )
        for machine in machines
    ]
    checks = [*judge_machines(examined), *judge_meeting_point(place)]
    return Examination(place.launcher, tuple(map(str, machines)), tuple(checks))


def judge_meeting_point(place: Place) -> Sequence[MachineCheck]:
    """Return the check of the port at which the ranks have met: it was free, but may not be so for the next run."""
    if place.address is None or place.hosted:
        return []
    port = place.address[1]
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split())
    if not first <= port <= last:
        return [MachineCheck("meeting point", "ok", f"port {port} was free")]
    finding = f"port {port} is one that the system gives to any connection ({first} to {last})"
    remedy = f"choose one below {first} (MASTER_PORT, --master-port): it may be taken when the run starts"
    return [MachineCheck("meeting point", "warn", finding, remedy)]


def _leave(store: dist.Store, rank: int, size: int) -> None:
    """Return when rank 0 has shown the outcome, and on rank 0 when all know that: the store ends with it."""
    until = time.monotonic() + _SECONDS_TO_LEAVE
    if rank:
        wait_for_key(store, "shown", until, "rank 0 has ended before it could print what it found")
        store.add("left", 1)
        return
    store.set("shown", "")
    while store.add("left", 0) < size - 1 and time.monotonic() < until:
        time.sleep(0.01)
