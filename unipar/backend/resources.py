"""Number of ranks and device of a run, and the check that there are enough GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.config import Config, Strategy
from unipar.distributed import accelerators
from unipar.distributed.accelerators import ACCELERATORS, VisibleDevices
from unipar.distributed.launchers import place_from_environment
from unipar.distributed.place import Place
from unipar.errors import Unsupported, WorldMismatch


@dataclass(frozen=True)
class RankCount:
    """Number of ranks, and the reason for it."""

    number: int
    why: str = ""
    """Reason in words; empty if the config gives the number itself."""


def count_ranks(config: Config, place: Place | None = None) -> RankCount:
    """Return the ranks of a run: from the config, else from the launcher's world, else one for each visible GPU."""
    backend = registry.find_backend(config.backend)
    strategy = strategies.strategy_of(config, backend)
    return ranks_in(strategy, config, place, alone=strategies.is_single_process(strategy, backend))


def ranks_in(strategy: Strategy, config: Config, place: Place | None, *, alone: bool) -> RankCount:
    """Return the ranks of a run in a known strategy; `alone` if the strategy is always one process."""
    ranks, axes = config.parallel.ranks, strategy.axes
    if alone:
        return RankCount(1, f"{strategy} is one process")
    if place is not None:
        if ranks not in ("auto", place.size):
            raise WorldMismatch(
                f"{_asked_ranks(config)}, but {place.launcher} started {place.size} "
                f"process{'es' * (place.size > 1)}; start {ranks} processes, or set parallel.data: auto"
            )
        return RankCount(place.size, f"started by {place.launcher}")
    if ranks != "auto":
        return RankCount(ranks)
    if config.device == "cpu":
        return RankCount(axes.fewest_ranks, "auto: no launcher, and device is cpu")
    if ":" in config.device or config.device == "mps":
        return RankCount(axes.fewest_ranks, f"auto: no launcher, and device is {config.device} alone")
    here = visible_devices("" if config.device == "auto" else config.device)
    return RankCount(here.count or axes.fewest_ranks, f"auto: no launcher, {here} visible here")


def _asked_ranks(config: Config) -> str:
    axes = config.parallel.axes
    if not axes.split:
        return f"parallel.data: {config.parallel.data}"
    return f"data {config.parallel.data} x {axes} = {config.parallel.ranks} ranks"


def find_foreign_place() -> Place | None:
    """Return this process's place among others if a foreign launcher started it, else None."""
    return place_from_environment(registry.list_launchers())


def refuse_other_machines(config: Config) -> None:
    """Raise WorldMismatch if the config wants more machines than this one, where unipar would start all ranks."""
    if config.machines is None or config.machines.nodes == 1:
        return
    on = config.machines.on or "slurm"
    raise WorldMismatch(
        f"machines.nodes: {config.machines.nodes}, and unipar starts ranks on this machine alone: hand the run over "
        f"with `unipar submit FILE --on {on}`, start it with a launcher on all machines (torchrun, srun, mpirun), "
        "or try it here with --set machines.nodes=1"
    )


def choose_device(config: Config) -> tuple[str, str]:
    """Return `cpu`, `cuda` or `cuda:N`, and the reason if the config leaves the choice open."""
    if config.device != "auto":
        return config.device, ""
    here = accelerators.find_visible_devices()
    return here.type or "cpu", f"auto: {here} visible here"


def visible_devices(kind: str = "") -> VisibleDevices:
    """Return the visible devices of a type; without one, those of ranks with `device: auto`."""
    here = accelerators.find_visible_devices()
    return here if kind in ("", here.type) else VisibleDevices(kind)


def check_device_count(
    config: Config,
    number: int,
    local: int | None = None,
    asking_key: str = "parallel.data",
    *,
    launched: bool = False,
) -> None:
    """Raise Unsupported if there are fewer devices than ranks.

    `local` is the number of ranks on this machine if not all are here; `asking_key` names the source of `number`. A
    launcher that has started the ranks (`launched`) may show each its own device alone; the ranks compare them when
    they meet.
    """
    kind, _, index = choose_device(config)[0].partition(":")
    if kind == "cpu":
        return
    wanted = local or number
    if kind == "mps":
        if wanted > 1:
            one = f"{asking_key}: {wanted} ranks on mps, which is one process"
            raise _too_few_devices(config, kind, one, "set device: cpu")
        return
    here = visible_devices(kind)
    if index:
        if int(index) >= here.count:
            asked_device = f"device: {kind}:{index} does not exist; {here} visible here"
            raise _too_few_devices(config, kind, asked_device, "set device: cpu")
        if wanted > 1 and not ACCELERATORS[kind].can_be_shared:
            one = (
                f"{asking_key}: {wanted} ranks on {kind}:{index}, whose tensors gloo cannot move: ranks cannot share it"
            )
            raise _too_few_devices(config, kind, one, f"set device: {kind} or cpu")
    elif wanted > here.count and not (launched and here.count == 1):
        share = f", or share one {ACCELERATORS[kind].noun} with device: {kind}:0" * ACCELERATORS[kind].can_be_shared
        ways = f"lower it, set device: cpu{share}" if here.count else "set device: cpu"
        raise _too_few_devices(config, kind, f"{asking_key}: {wanted} ranks on {kind}; {here} visible here", ways)


def _too_few_devices(config: Config, kind: str, what: str, way: str) -> Unsupported:
    variable = ACCELERATORS[kind].choice
    choice = os.environ.get(variable) if variable else None
    limit = f" ({variable}={choice})" if choice is not None else ""
    return Unsupported(str(strategies.strategy_of(config)), [f"{what}{limit}; {way}"])
