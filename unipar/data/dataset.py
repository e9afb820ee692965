"""`DataSource`: the dataset or DataLoader that a task returned, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from typing_extensions import override

from unipar.config import BatchSizes, Config
from unipar.config.config import Data
from unipar.data.order import SampleKey
from unipar.distributed.world import World
from unipar.errors import ConfigError, TaskError
from unipar.utils.seeding import mix_seed, seed_all

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class DataSource:
    """Source of samples: the task's dataset, with the settings of its DataLoader if it returned one."""

    dataset: Any
    collate: Collate
    settings: Data
    loader_arguments: dict[str, Any]
    """Further arguments of the user's DataLoader, passed on to the one that unipar makes."""

    sampler: Any = None
    """The DataLoader's own sampler, which gives the order of an epoch; None: unipar draws it."""

    @property
    def streams(self) -> bool:
        """True if samples come one after another instead of by index."""
        return _is_stream(self.dataset)

    @property
    def length(self) -> int | None:
        """Number of samples; None for a stream without len()."""
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            if self.streams:
                return None
            raise

    def __len__(self) -> int:
        return len(self.dataset)


def _is_stream(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    return callable(getattr(dataset, "__iter__", None)) and not callable(getattr(dataset, "__getitem__", None))


def training_data_source(
    data: Any, collate: Collate | None, default: Collate, config: Config, sizes: BatchSizes
) -> DataSource:
    """Return the source for what data() returned; raise if a key of the config's `data` has no effect on it."""
    source = data_source_of(data, collate, default, config, sizes)
    if source.streams and sizes.tokens is not None:
        raise ConfigError(
            f"batch.tokens: {sizes.total}: data() returned a stream, and batches of tokens are planned by the length "
            "of every sample before the first step: return a map-style dataset, or give batch.total"
        )
    keys_given = config.data.model_fields_set
    if source.streams and "shuffle" in keys_given and config.data.shuffle:
        raise ConfigError(
            "data.shuffle: true: data() returned a stream, whose order is its own; shuffle in its __iter__ (the "
            "generators are seeded by train.seed and the epoch), and leave the key out"
        )
    if not source.streams and "stream" in keys_given:
        raise ConfigError(
            f"data.stream: {config.data.stream}: data() returned a map-style dataset, which is divided by index; "
            "leave the key out"
        )
    return source


def data_source_of(
    data: Any, collate: Collate | None, default: Collate, config: Config, sizes: BatchSizes
) -> DataSource:
    """Return the source for a dataset, or for a DataLoader, whose dataset, collate_fn and workers are used."""
    settings = config.data
    if isinstance(data, DataLoader):
        return _source_from_loader(data, collate, config, sizes)
    if _is_stream(data):
        return DataSource(data, collate or default, settings.model_copy(update={"shuffle": False}), {})
    if not callable(getattr(data, "__getitem__", None)) or not callable(getattr(data, "__len__", None)):
        raise TaskError(
            f"data() returned {type(data).__name__}; it must return a dataset with __getitem__ and __len__, a stream, "
            "or a DataLoader"
        )
    return DataSource(data, collate or default, settings, {})


def _source_from_loader(
    loader: DataLoader[Any], collate: Collate | None, config: Config, sizes: BatchSizes
) -> DataSource:
    if loader.batch_size is None:
        sampling = "a batch_sampler of its own" if loader.batch_sampler is not None else "batch_size=None"
        raise TaskError(
            f"the DataLoader has {sampling}; unipar decides which samples are a batch: give batch_size instead"
        )
    if sizes.tokens is not None and loader.batch_size != 1:
        raise TaskError(
            f"the DataLoader's batch_size is {loader.batch_size}, and batch.tokens ({sizes.total}) says how many "
            "samples are a batch: leave batch_size out"
        )
    if loader.batch_size not in (1, sizes.total, sizes.micro):
        raise TaskError(
            f"the DataLoader's batch_size is {loader.batch_size}; it must be batch.total ({sizes.total}), "
            f"batch.micro ({sizes.micro}) or unset"
        )
    sampler: Any = loader.sampler
    dataset: Any = loader.dataset
    streams = _is_stream(dataset)
    own_order: Any = None
    shuffle = _is_random_sampler(sampler) and not sampler.replacement and len(sampler) == len(dataset)
    if not shuffle and not streams and type(sampler) is not SequentialSampler:
        if "shuffle" in config.data.model_fields_set:
            raise ConfigError(
                f"data.shuffle: {str(config.data.shuffle).lower()}: the DataLoader has a sampler of its own "
                f"({type(sampler).__name__}), which gives the order; leave the key out, or the sampler"
            )
        own_order = sampler
    if collate is not None and loader.collate_fn not in (default_collate, collate):
        raise TaskError(
            "the DataLoader has a collate_fn of its own, and the task has collate(samples): leave one of them out"
        )
    own = getattr(sampler, "generator", None) if type(sampler) is RandomSampler else None  # torchdata makes one always
    if loader.generator is not None or own is not None:
        raise TaskError("the DataLoader has a generator of its own; the order follows from train.seed: leave it out")
    keys_given = config.data.model_fields_set
    of_loader: dict[str, Any] = {"shuffle": shuffle, "workers": loader.num_workers}
    if streams:
        keys_given = keys_given - {"shuffle"}
    if loader.drop_last:
        of_loader["last_batch"] = "drop"
    settings = config.data.model_copy(update={k: v for k, v in of_loader.items() if k not in keys_given})
    names = ("worker_init_fn", "timeout", "multiprocessing_context") if settings.workers else ()
    arguments = {name: getattr(loader, name) for name in names}
    if settings.workers and loader.prefetch_factor is not None:
        arguments["prefetch_factor"] = loader.prefetch_factor
    return DataSource(loader.dataset, collate or loader.collate_fn, settings, arguments, own_order)


def _is_random_sampler(sampler: Any) -> bool:
    """Return whether a sampler is what shuffle=True makes: of a DataLoader, or of torchdata's StatefulDataLoader."""
    kind = type(sampler)
    return kind is RandomSampler or (kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata."))


def check_same_sample_count(samples: int, world: World) -> None:
    """Raise unless every rank has the same number of samples: otherwise batches would differ, or ranks would hang."""
    world.agree(
        "samples",
        str(samples),
        lambda first: (
            f"the data has {samples} samples on rank {world.rank} and {first} on rank 0: every rank must see all "
            "of it, and unipar divides it"
        ),
    )


@final
class SeededDataset(Dataset[Any]):
    """Dataset read by (epoch, index); each sample has random numbers that depend only on seed, epoch and index."""

    def __init__(self, dataset: Any, seed: int, collate: Collate | None = None) -> None:
        """`collate`: function that makes a batch of the samples, which may draw random numbers, too."""
        self.dataset, self.seed = dataset, seed
        self._draws = not _draws_nothing(dataset)
        self._collate_draws = collate not in (None, default_collate)

    @override
    def __getitem__(self, key: SampleKey) -> Any:
        seed_all(mix_seed(self.seed, 2, *key), device=False)
        return self.dataset[key[1]]

    def __getitems__(self, keys: list[SampleKey]) -> list[Any]:
        """Return several samples; a DataLoader calls it in place of `__getitem__`."""
        if self._draws:
            return [self[key] for key in keys]
        if self._collate_draws:
            seed_all(mix_seed(self.seed, 2, *keys[-1]), device=False)  # as if the last sample had been seeded, too
        dataset = self.dataset
        return [dataset[i] for _, i in keys]


def _draws_nothing(dataset: Any) -> bool:
    """Return whether samples are only looked up, so that none of them needs random numbers: seeding takes 20 us."""
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    return type(dataset) in (TensorDataset, list, tuple)
