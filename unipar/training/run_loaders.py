"""The data of a run in training: its loader, the place of a stream in a checkpoint, and the way back to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

from torch import Tensor
from torch.utils.data import default_collate

from unipar.checkpoint.packed_values import pack_values, unpack_values
from unipar.checkpoint.protocol.verifying import CheckpointContents
from unipar.checkpoint.saved_state import SavedState
from unipar.data.dataset import DataSource, check_same_sample_count, training_data_source
from unipar.data.lengths import SampleLengths, measure_lengths
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import DataPosition
from unipar.data.stream import STREAM_PROMISES
from unipar.data.stream_loader import StreamLoader, StreamPlace
from unipar.data.stream_reader import ReadingOn, ReadPart, has_state
from unipar.distributed.device import has_own_memory
from unipar.distributed.meeting.text_rounds import open_rounds
from unipar.errors import CheckpointError, TaskError
from unipar.run_folder.heartbeat import MEASURING, READING_ON
from unipar.utils.address import Location
from unipar.utils.text import count_of, format_duration

if TYPE_CHECKING:
    from unipar.config import BatchSizes, Config
    from unipar.distributed.world import World
    from unipar.run_folder.heartbeat import HeartbeatWriter
    from unipar.task import Task

Loader = MicrobatchLoader | StreamLoader


class FedRun(Protocol):
    """Part of a run in training that loaders need."""

    task: Task
    world: World
    config: Config
    sizes: BatchSizes
    heartbeat: HeartbeatWriter

    @property
    def loader(self) -> Loader:
        """Loader of this rank."""
        ...

    @property
    def loaders(self) -> RunLoaders:
        """All loaders of this rank."""
        ...

    def mark(self, phase: str) -> None:
        """Set the phase of the heartbeat."""
        ...

    def note(self, event: str, **fields: Any) -> None:
        """Write an event into this rank's run log."""
        ...


@final
class RunLoaders:
    """Loader of what data() returned, or of the dataloader that a script brings: the one that is read now.

    In a run that goes on, the one that the checkpoint was saved in goes on, and others begin as in any run.
    """

    def __init__(self, live: FedRun, collate: Callable[[list[Any]], Any] | None) -> None:
        self._live, self._collate = live, collate
        self._current: Loader | None = None
        self.brought = False
        """Whether the loader is that of a dataloader, which a script has given to `run.over`."""

        self._place: Callable[[Loader], None] | None = None
        self._of_loader = False
        """Whether `_place` is for a dataloader's loader."""

        self._placed: Any = None
        """Dataset of the dataloader that was placed."""

    def get(self) -> Loader:
        """Return the loader that is read now; at first, that of data()."""
        if self._current is None:
            self._current = _loader_from_beginning(self._live, self._live.task.data(), self._collate)
            if self._place is not None and not self._of_loader:
                self._place(self._current)
        return self._current

    def use(self, loader: Loader) -> None:
        """Read another loader from now on, in place of data()'s."""
        self._current = loader

    def over(self, dataloader: Any) -> Loader:
        """Read a script's dataloader from now on, and return its loader."""
        self._current = loader = _loader_from_beginning(self._live, dataloader, self._collate)
        self.brought = True
        dataset = getattr(dataloader, "dataset", dataloader)
        if self._place is not None and self._of_loader and (self._placed is None or self._placed is dataset):
            self._placed = dataset
            self._place(loader)
        return loader

    def go_on(self, place: Callable[[Loader], None], *, of_loader: bool) -> None:
        """Have `place` put the first loader of data(), or the first of a dataloader, where a checkpoint was saved.

        A script may bring its dataloader later, and may give the same one again.
        """
        self._place, self._of_loader = place, of_loader
        if not of_loader and self._current is not None:
            place(self._current)


def was_in_loader(saved: Mapping[str, Any], task: Task) -> bool:
    """Return whether a checkpoint was saved in the data of a script's dataloader; `saved`: its place in the data."""
    return bool(saved.get("loader")) or not task.defines("data")


def refuse_shared_stream(trained: DataSource, evaluated: DataSource) -> None:
    """Raise TaskError if an evaluation would read the very stream whose place the training keeps."""
    if evaluated.dataset is trained.dataset and trained.streams and has_state(trained.dataset):
        raise TaskError(
            f"validation() returned the same {type(trained.dataset).__name__} object as data(), and an evaluation "
            "would move its state_dict() away from the training's place: return another object"
        )


def _loader_from_beginning(live: FedRun, data: Any, collate: Callable[[list[Any]], Any] | None) -> Loader:
    source = training_data_source(data, collate, default_collate, live.config, live.sizes)
    if source.length is not None:
        check_same_sample_count(source.length, live.world)
    pin, seed = has_own_memory(live.world.device), live.config.train.seed
    if not source.streams:
        lengths = _measured(live, source)
        agree = partial(live.world.agree, "order")
        return MicrobatchLoader(source, live.sizes, live.world.data_rank, seed, pin=pin, lengths=lengths, agree=agree)
    live.note("data", said=f"a stream: {STREAM_PROMISES[source.settings.stream]}")
    return StreamLoader(
        source,
        live.sizes,
        live.world,
        seed,
        pin=pin,
        gives_places=live.config.checkpoint is not None,
        reading_on=_ReadingOnNotice(live),
    )


def _measured(live: FedRun, source: DataSource) -> SampleLengths | None:
    """Return the lengths of all samples, of which each rank measures a part; None without `batch.tokens`."""
    if live.sizes.tokens is None:
        return None
    world, began = live.world, time.monotonic()

    def report(done: int, of: int) -> None:
        live.mark("data")
        live.heartbeat.set_work(MEASURING, done, of)

    def add_up(lengths: Tensor) -> Tensor:
        live.mark("waiting")
        return world.sum(lengths.to(world.device)).cpu()

    seed, share = live.config.train.seed, (world.rank, world.size)
    lengths = measure_lengths(live.task, source.dataset, seed, live.sizes, share=share, add_up=add_up, report=report)
    assert lengths is not None
    live.heartbeat.set_work("")
    live.mark("data")
    took = format_duration(time.monotonic() - began)
    samples, tokens = count_of(len(lengths.of), "sample"), f"{sum(lengths.of):,} tokens"
    live.note("data", said=f"{samples} of {tokens}, the longest of {lengths.longest:,}, measured in {took}")
    return lengths


@final
class _ReadingOnNotice:
    """Notice of how far a stream was read on; at the end this rank waits for the others, however long they take."""

    def __init__(self, live: FedRun) -> None:
        self._live = live
        self._read: list[int] = []
        """Samples that each reader of this rank has read past, of those that have ended."""

    def __call__(self, item: ReadingOn) -> None:
        live = self._live
        live.mark("data")
        live.heartbeat.set_work(READING_ON, item.read, item.of)
        if not item.last:
            return
        self._read.append(item.read)
        source, world = live.loader.source, live.world
        if len(self._read) < max(1, source.settings.workers):
            return
        open_rounds(world, world.key("read on"), lambda: live.mark("waiting"))("read", lambda _: "")
        live.heartbeat.set_work("")
        live.mark("data")
        read = item.read if source.settings.stream == "whole" else sum(self._read)
        past = f"{read:,} sample{'s' * (read != 1)} in {format_duration(item.seconds)}"
        live.note("read on", said=f"the stream was read on past {past}")


# Into a checkpoint


def describe_data_position(live: FedRun, done: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a checkpoint's state.json says of the data, and the tensors of streams that this rank saves.

    All ranks call this together.
    """
    loader = live.loader
    place = loader.position(done)
    described: dict[str, Any] = {"epoch": place.epoch, "sample": place.sample, "length": loader.source.length}
    if live.loaders.brought:
        described["loader"] = True
    if not isinstance(loader, StreamLoader):
        if loader.sampler is not None:
            described["order"] = loader.sampler.digest(place.epoch)
        return described, {}
    world, own = live.world, loader.stream_place()
    saves = world.rank == 0 if loader.whole else world.leads
    parts, tensors, why = _packed_parts(own, 0 if loader.whole else world.data_rank, saves=saves)
    described["stream"] = {
        "read": loader.source.settings.stream,
        "epoch": own.epoch,
        "sample": own.sample,
        "workers": loader.parts,
        "seats": [{"parts": parts, "turn": own.turn}],
    }
    if not loader.whole:
        mine = {"seat": world.data_rank, "parts": parts, "turn": own.turn, "why": why} if saves else None
        places = json.loads(open_rounds(world, world.key("stream places"))(json.dumps(mine), _sorted_seats))
        described["stream"]["seats"] = [{"parts": one["parts"], "turn": one["turn"]} for one in places]
        why = next((one["why"] for one in places if one["why"]), "")
    if why:
        described["stream"]["why"] = why
    return described, tensors


def _sorted_seats(texts: list[str]) -> str:
    """Return the seats of the ranks that have one, in order."""
    seats: list[dict[str, Any]] = [one for text in texts if (one := json.loads(text)) is not None]
    return json.dumps(sorted(seats, key=lambda one: one["seat"]))


def _packed_parts(place: StreamPlace, seat: int, *, saves: bool) -> tuple[list[Any], dict[str, Tensor], str]:
    """Return how far the parts of a seat were read, as JSON; their tensors; and why there are no states, or ""."""
    tensors: dict[str, Tensor] = {}
    packed: list[Any] = []
    why = ""
    for turn, part in enumerate(place.parts):
        state, mine = None, dict[str, Tensor]()
        why = why or part.why
        if part.state is not None and saves:
            try:
                root = f"stream[{seat}][{turn}]"
                state, mine = pack_values(part.state, root, "state_dict() of the stream", exact=True)
            except TaskError as e:
                why = why or str(e)
        packed.append({"read": part.read, "ended": part.ended, "state": state})
        tensors |= mine
    return packed, tensors, why


# And back


def place_loader(live: FedRun, loader: Loader, saved_in: CheckpointContents, given_keys: Collection[str]) -> None:
    """Have a loader go on where a checkpoint was saved; `given_keys`: keys of the config given for this run."""
    saved, path, step = saved_in.state["data"], saved_in.path, saved_in.manifest.step
    refuse_other_data(loader, saved, path, of_loader=was_in_loader(saved, live.task))
    begin = DataPosition(step, int(saved["epoch"]), int(saved["sample"]))
    if not isinstance(loader, StreamLoader):
        _refuse_other_order(loader, saved, path)
        loader.go_on_from(begin)
        return
    stream: Mapping[str, Any] | None = saved.get("stream")
    if stream is None and loader.whole:
        loader.go_on_from(begin)
        return
    every = [one for seat in stream["seats"] for one in seat["parts"]] if stream else []
    why = _NO_PLACE if stream is None else _why_not_here(loader, stream, live.world.data_size)
    if stream is None or why:
        epoch = int(stream["epoch"]) if stream else begin.epoch
        if not every or not all(one["ended"] for one in every):
            _leave_out_rest(live, loader.source.settings.stream, epoch, f"checkpoint {path}: {why}", given_keys)
        loader.go_on_from(DataPosition(step, epoch + 1, 0))
        return
    seat = stream["seats"][0 if loader.whole else live.world.data_rank]
    with SavedState(path, saved_in.manifest) as tensors:
        states = [unpack_values(one["state"], lambda at: tensors.whole(at, "stream")) for one in seat["parts"]]
    parts = [
        ReadPart(int(one["read"]), state, bool(one["ended"])) for one, state in zip(seat["parts"], states, strict=True)
    ]
    reads_on = any(one["state"] is None and one["read"] and not one["ended"] for one in every)
    place = StreamPlace(int(stream["epoch"]), int(stream["sample"]), parts, int(seat["turn"]))
    loader.go_on_from(begin, place, reads_on=reads_on)
    after = f"epoch {place.epoch + 1} after {place.sample:,} samples"
    if reads_on:
        why = stream.get("why") or "its state was not saved"
        live.note("data", said=f"the stream is read on to {after}: {why}")
    else:
        live.note("data", said=f"the stream was put back to {after}")


_NO_PLACE = "it does not say how far each rank has read its part of the stream"


def _why_not_here(loader: StreamLoader, stream: Mapping[str, Any], shares: int) -> str:
    """Return why this run's ranks cannot go on in the middle of the epoch, or ""."""
    now, before = loader.source.settings.stream, stream["read"]
    if now != before:
        return f"it was saved with data.stream: {before}, and now it is {now}"
    seats, workers = len(stream["seats"]), int(stream["workers"])
    if loader.whole or (seats, workers) == (shares, loader.parts):
        return ""
    return (
        f"with data.stream: {now}, {_readers(seats, workers)} have read parts of the stream, and now there are "
        f"{_readers(shares, loader.parts)}, whose parts have other samples"
    )


def _readers(seats: int, workers: int) -> str:
    return f"{seats} x {workers} readers (data ranks x data workers)"


def _leave_out_rest(live: FedRun, reads: str, epoch: int, why: str, given_keys: Collection[str]) -> None:
    """Say that an epoch's rest is left out if data.stream was given for this run; raise CheckpointError if not."""
    if "data.stream" not in given_keys:
        raise CheckpointError(
            f"{why}: the rest of epoch {epoch + 1} cannot be read so that each sample comes once; go on as it was "
            f"saved, or begin epoch {epoch + 2} with --set data.stream={reads}"
        )
    live.note("data", said=f"{why}: the rest of epoch {epoch + 1} is left out")


def _refuse_other_order(loader: MicrobatchLoader, saved: Mapping[str, Any], path: Location) -> None:
    """Raise CheckpointError if the samples of the epoch come in another order than they did."""
    before, now = saved.get("order"), None
    if loader.sampler is not None:
        now = loader.sampler.digest(int(saved["epoch"]))
    if before != now and saved["sample"]:
        which = "the DataLoader had a sampler of its own, and has none now"
        if now is not None:
            which = "the DataLoader's sampler gives another order" if before else "the DataLoader had no sampler"
        raise CheckpointError(
            f"checkpoint {path}: {which} in epoch {int(saved['epoch']) + 1}, of which {saved['sample']:,} samples were "
            "read: go on with the same sampler, drawn from the global generators, or begin a run with these weights "
            "(model.weights)"
        )


def refuse_other_data(loader: Loader, saved: Mapping[str, Any], path: Location, *, of_loader: bool = False) -> None:
    """Raise CheckpointError if the data has another length than it had."""
    before, now = saved["length"], loader.source.length
    if before != now:
        what = "the loader of run.over()" if of_loader else "data()"
        first = ", with the loader that was being read then as the first (run.done tells)" if of_loader else ""
        raise CheckpointError(
            f"checkpoint {path}: {what} had {_samples(before)} and has {_samples(now)} now: the order of samples would "
            f"be another; go on with the same data{first}, or begin a run with these weights (model.weights)"
        )


def _samples(length: int | None) -> str:
    return "no length" if length is None else f"{length:,} samples"
