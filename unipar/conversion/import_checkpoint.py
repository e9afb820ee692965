"""`unipar checkpoint import`: a checkpoint of unipar from that of another library, for the task of a config."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sys import stderr
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from unipar.checkpoint.format.names import step_folder_name
from unipar.config import Config
from unipar.errors import CheckpointError, OutExists
from unipar.utils.text import short_dtype

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unipar.checkpoint.importing.found_state import ModelState
    from unipar.checkpoint.protocol.save_checkpoint import PieceToSave


@dataclass(frozen=True)
class ImportedCheckpoint:
    """Checkpoint that was made from another library's."""

    path: Path
    step: int
    tensors: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class ImportWish:
    """Import that the command asks for."""

    source: Path
    out: Path
    step: int | None = None
    rename: Sequence[tuple[str, str]] = ()
    trust_pickle: bool = False
    weights_only: bool = False


def import_checkpoint(config: Config, wish: ImportWish) -> ImportedCheckpoint:
    """Write the checkpoint, in a folder for `unipar run --from`; names and shapes are those of the task's model."""
    from unipar.checkpoint.importing.reader_process import is_pickled, kind_of_source, take_tensors

    kind = kind_of_source(wish.source)
    if is_pickled(wish.source, kind, weights_only=wish.weights_only) and not wish.trust_pickle:
        raise CheckpointError(
            f"{wish.source} is pickled, and a pickled file can run code when it is read: if you trust where it comes "
            "from, say --trust-pickle; it is then read in a process of its own"
        )
    modules = _modules_of(config)
    model = _state_of(config, modules)
    wish.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".tmp-import-", dir=wish.out) as folder:
        contents = take_tensors(
            wish.source, kind, model, Path(folder), rename=wish.rename, weights_only=wish.weights_only
        )
        step = contents.state["found_step"] if wish.step is None else wish.step
        step = 0 if step is None else int(step)
        path = wish.out / step_folder_name(step)
        if path.exists():
            raise OutExists(f"{path} already exists; name another folder with -o, or delete it")
        tensors = _save(config, modules, contents, wish, step)
    return ImportedCheckpoint(path, step, tensors, tuple(contents.state["remarks"]))


def _modules_of(config: Config) -> Mapping[str, nn.Module]:
    """Return the parts of the task's model, with values if it has buffers that no state dict holds."""
    import torch

    from unipar.model.create import check_parts
    from unipar.model.state_names import unsaved_buffers
    from unipar.training.task_facts import load_task
    from unipar.utils.seeding import seed_all

    task = load_task(config)
    with redirect_stdout(stderr):
        try:
            with torch.device("meta"):
                parts = check_parts(task.model())
        except (NotImplementedError, RuntimeError):  # the constructor reads values
            parts = {}
        if not parts or any(unsaved_buffers(module) for module in parts.values()):
            seed_all(config.train.seed)
            parts = check_parts(task.model())
    return parts


def _prefixed(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each part with what stands before its names in the state."""
    for name, module in modules.items():
        yield "" if len(modules) == 1 else f"{name}.", module


def _state_of(config: Config, modules: Mapping[str, nn.Module]) -> ModelState:
    from unipar.backend.precision import parameter_dtype
    from unipar.checkpoint.importing.found_state import ModelState
    from unipar.model.create import narrow_frozen_parameters
    from unipar.model.state_names import state_names
    from unipar.training.trained_parts import tied_names

    dtype, narrow = parameter_dtype(config.train.precision), dict[str, str]()
    parameters: dict[str, list[int]] = {}
    buffers: dict[str, list[int]] = {}
    trained: list[str] = []
    tied: list[list[str]] = []
    for prefix, module in _prefixed(modules):
        names = state_names(module)
        parameters |= {prefix + name: list(p.shape) for name, p in module.named_parameters()}
        buffers |= {prefix + name: list(b.shape) for name, b in module.named_buffers() if name not in names.unsaved}
        trained += [prefix + name for name in names.trained]
        kept = {id(p) for p in narrow_frozen_parameters(module, dtype)}
        narrow |= {prefix + name: short_dtype(p.dtype) for name, p in module.named_parameters() if id(p) in kept}
        tied += [[prefix + name for name in several] for several in tied_names(module)]
    groups = _groups_of_task(config, modules)
    return ModelState(parameters, trained, buffers, tied, short_dtype(dtype), narrow=narrow, groups=groups)


def _groups_of_task(config: Config, modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names in each group that the task's groups(model) returns; none if it has no such method."""
    from unipar.model.parameter_groups import parameter_groups
    from unipar.training.task_facts import load_task

    groups: list[list[str]] = []
    for prefix, module in _prefixed(modules):
        try:
            wanted = load_task(config, prepared=False).groups(module)
        except Exception:  # the model may be on meta, without values; a run says what is wrong
            return []
        if wanted is None:
            return []
        groups += [[prefix + n for n in g.names] for g in parameter_groups(module, config, wanted, own_optimizer=True)]
    return groups


def _save(config: Config, modules: Mapping[str, nn.Module], contents: Any, wish: ImportWish, step: int) -> int:
    """Save what was read, and the buffers that no state dict holds, as a checkpoint; return the number of tensors."""
    from unipar.backend import Region
    from unipar.checkpoint.protocol.retention import Retention
    from unipar.checkpoint.protocol.save_checkpoint import PieceToSave, save_checkpoint
    from unipar.checkpoint.saved_state import SavedState
    from unipar.checkpoint.tensor_bytes import bytes_of

    with SavedState(contents.path, contents.manifest) as saved:

        def memory(name: str, kind: str) -> memoryview:
            return bytes_of(saved.whole(name, kind))

        pieces = [
            PieceToSave(t.name, t.kind, t.dtype, t.shape, Region(0, t.numel), partial(memory, t.name, t.kind))
            for t in contents.manifest.tensors.values()
        ]
        pieces += _unsaved_pieces(config, modules)
        state = _state(config, modules, wish, step, skipped=min(step, int(contents.state["skipped"])))
        save_checkpoint(wish.out, step, pieces, state, retention=Retention(keep=10**9))
    return len(pieces)


def _unsaved_pieces(config: Config, modules: Mapping[str, nn.Module]) -> Iterator[PieceToSave]:
    from unipar.backend import Region
    from unipar.backend.precision import parameter_dtype
    from unipar.checkpoint.protocol.save_checkpoint import PieceToSave
    from unipar.checkpoint.tensor_bytes import bytes_of, dtype_name
    from unipar.model.create import cast_if_float
    from unipar.model.state_names import state_names

    for prefix, module in _prefixed(modules):
        unsaved = set(state_names(module).unsaved)
        for name, b in module.named_buffers():
            if name in unsaved:
                cast: Tensor = cast_if_float(b.detach(), parameter_dtype(config.train.precision)).contiguous()
                called = prefix + name
                where, data = Region(0, cast.numel()), partial(bytes_of, cast)
                yield PieceToSave(called, "buffer", dtype_name(cast, called), tuple(cast.shape), where, data)


def _state(
    config: Config, modules: Mapping[str, nn.Module], wish: ImportWish, step: int, *, skipped: int
) -> dict[str, Any]:
    from unipar.model.state_names import state_names
    from unipar.training.trained_parts import tied_names

    plain = config.model_dump(mode="json")
    return {
        "imported": str(wish.source),
        "time": time.time(),
        "config": plain,
        "data": _position(config, wish.source, step),
        "steps": None,
        "strategy": "",
        "ranks": None,
        "parts": {
            name: {
                "skipped": skipped,
                "counters": {},
                "groups": [],
                "tied": tied_names(module),
                **state_names(module)._asdict(),
            }
            for name, module in modules.items()
        },
        "metrics": {},
        "best": [],
        "task": None,
    }


def _position(config: Config, source: Path, step: int) -> dict[str, Any]:
    """Return the place in the data after this many steps of this config's batches, read from the beginning."""
    from unipar.backend.offered_strategies import is_single_process, strategy_of
    from unipar.backend.registry import find_backend
    from unipar.training.task_facts import gather_task_facts

    backend, batch, ranks = find_backend(config.backend), config.batch, config.parallel.data
    if is_single_process(strategy_of(config, backend), backend):
        ranks = 1
    if batch.tokens is not None and step:
        raise CheckpointError(
            f"{source} has done {step:,} steps, and on how many samples is not known: batch.tokens ({batch.tokens}) "
            "gives each step another number; import it with the batch.total of that training, and go on with tokens"
        )
    if ranks == "auto" and batch.total is None and step:
        raise CheckpointError(
            f"{source} has done {step:,} steps, and on how many samples is not known: batch.total is micro x "
            f"accumulate x data ({batch.micro} x {batch.accumulate} x data), and parallel.data is auto; say how many "
            "data ranks there were with --set parallel.data=N"
        )
    if batch.is_auto:  # where the data goes on does not depend on microbatches
        batch = batch.changed({"micro": 1})
    sizes = batch.settle(1 if ranks == "auto" else ranks)
    facts = gather_task_facts(config, sizes)
    epoch, batches = divmod(step, facts.per_epoch) if facts.per_epoch else (0, step)
    return {"epoch": epoch, "sample": batches * sizes.total, "length": facts.samples}
