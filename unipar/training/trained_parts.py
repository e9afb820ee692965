"""Parts of a run, usually one: each module that `model()` returned, with its engine and the results of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Engine, Factor, Part, Piece, Read, Region, Step
from unipar.config import Config
from unipar.distributed.device import has_own_memory
from unipar.distributed.world import World
from unipar.engines.learning_rate import DeviceFactors, RateSchedule
from unipar.engines.update_guard import skips_updates
from unipar.errors import NonFinite, TaskError, UniparError
from unipar.model.fp8_linears import fp8_linears_of
from unipar.model.state_names import StateNames, state_names

_MAX_PENDING_STEPS = 64
"""Number of steps whose losses are kept one by one before they are copied into the window."""

MOST_SKIPPED = 20
"""Steps in a row whose updates train.nonfinite: skip leaves out, after which the run ends."""


class OfOptimizer(NamedTuple):
    """Optimizer of a part as it was made, before a library has put its own in its place."""

    name: str
    """Name of its class."""

    rates: tuple[float, ...]
    """Base learning rate of each of its groups."""

    dtypes: Mapping[str, torch.dtype]
    """Dtype of each trained weight before a library has changed the module."""


@final
class TrainedPart:
    """One part: its module, its engine, and the losses of its steps that are not yet reported."""

    def __init__(
        self,
        part: Part,
        engine: Engine,
        config: Config,
        world: World,
        *,
        alone: bool,
        tied: Sequence[Sequence[str]] = (),
        names: StateNames | None = None,
        made: OfOptimizer | None = None,
    ) -> None:
        self.name, self.module, self.engine, self.world = part.name, part.module, engine, world
        self.config = config
        """Config with this part's own optimizer and clip."""

        self.fp8_unchecked = fp8_linears_of(part.module)
        """Linear layers that must multiply in fp8 in the first step; None when they have done it."""

        self.error_suffix = "" if alone else f" of {part.name!r}"
        """Words that name the part in errors; empty if it is the only one."""

        self._names = frozenset(n for n, p in part.module.named_parameters() if p.requires_grad)
        self.window = torch.zeros((2, config.log.every), dtype=torch.float64, device=world.device)
        """Loss and norm of the steps that are not yet reported; norms that the host has read, or may skip, are 0."""

        self.skipped = 0
        """Number of updates skipped because of a norm that was not finite, without those in `lately_skipped`."""

        self.lately_skipped: Tensor | None = None
        """Number of updates skipped, on the device, since `count_skipped` was called."""

        self._skips = _SkippedSteps()
        self._factors: DeviceFactors | None = None

        self.last: dict[str, Any] | None = None
        """Step, loss, norm and learning rates of the last report."""

        self.tied = [list(names) for names in tied]
        """Names that share one parameter."""

        self.state_names = names or state_names(part.module)
        """Names that are trained, and those that state dicts leave out, as the model's author has made it."""

        made = made or OfOptimizer("", (), {})
        self.optimizer, self.rates, self.dtypes = made

        self._born_groups = self._plain_groups()
        self._steps: list[int] = []
        """Numbers (from 1) of the run's steps whose losses are in the window."""

        self._pending: list[tuple[int, Tensor | float, Tensor | float | None]] = []
        """Number, loss and norm of the latest steps, which are not yet in the window. On the CPU losses are read at
        once, so that no tensor stays allocated."""

        self._on_device, self._skipping = has_own_memory(world.device), skips_updates(config)
        self._ignores = config.train.nonfinite == "skip"
        """Whether a loss that is not finite is no error, since its update is left out."""

        self._streak: list[int] = []
        """The latest steps in a row whose updates were skipped."""

        self._norm: Tensor | None = None
        self._factor: Factor = 0.0
        """The schedule's factor in the last step."""

        self._loss_and_norm: Tensor | None = None
        self._step_numbers: list[int] = []

    def _plain_groups(self) -> list[dict[str, Any]]:
        """Return each group's settings that are plain values, and its rate as a number if it is a tensor."""
        return [
            {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params" and (_is_plain(value) or (key in _RATES and isinstance(value, Tensor)))
            }
            for group in self.engine.optimizer_groups()
        ]

    def group_state(self) -> list[dict[str, Any]]:
        """Return each group's settings for a checkpoint, and which of them the optimizer itself has changed."""
        now = self._plain_groups()
        return [
            {"settings": group, "changed": sorted(k for k in group if k not in _RATES and group[k] != born.get(k))}
            for group, born in zip(now, self._born_groups, strict=True)
        ]

    def restore_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Set what the optimizer itself had changed in its groups' settings, such as a count of its own."""
        groups = self.engine.optimizer_groups()
        if len(groups) != len(saved):
            if any(group["changed"] for group in saved):
                raise TaskError(
                    f"the checkpoint's optimizer keeps numbers of its own in {len(saved)} groups, and this one has "
                    f"{len(groups)}"
                )
            return
        for group, old in zip(groups, saved, strict=True):
            for key in old["changed"]:
                value = old["settings"][key]
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    def set_trainable(self, wanted: bool) -> None:
        """Set `requires_grad` of the part's parameters; found by name, because libraries replace the tensors."""
        self.engine.before_state_access()
        for name, p in self.module.named_parameters():
            if name in self._names:
                p.requires_grad_(wanted)

    def add_step(self, number: int, out: Step, factor: Factor) -> None:
        """Keep loss and norm of the run's step `number`, on the device, and the schedule's factor."""
        self._norm, self._factor = out.norm, factor
        if self._on_device:
            self._pending.append((number, out.loss, None if self._skipping else out.norm))
        else:
            self._pending.append((number, out.loss.item(), None))
        if len(self._pending) == _MAX_PENDING_STEPS:
            self.settle()
        if self._loss_and_norm is not None:
            self._loss_and_norm[0, len(self._step_numbers)] = out.loss
            self._loss_and_norm[1, len(self._step_numbers)] = out.norm
            self._step_numbers.append(number)

    def skip(self, number: int, skipped: bool | Tensor) -> None:
        """Count an update if it was skipped: the schedule waits; raise NonFinite if none may be, and the host knows."""
        if not self._skipping:
            if skipped is True:
                raise self._bad_norm(number)
            return
        if isinstance(skipped, Tensor) and self._on_device:
            self._skips.add(number, skipped)
            self.lately_skipped = skipped + (0 if self.lately_skipped is None else self.lately_skipped)
        elif skipped:
            self.skipped += 1
            self._skips.known.append(number)

    def count_skipped(self) -> int:
        """Return the number of updates skipped so far; the host waits for the device."""
        if self.lately_skipped is not None:
            self.skipped += int(self.lately_skipped)
            self.lately_skipped = self._factors = None
            self._skips.read()
        return self.skipped

    def take_skipped_steps(self) -> list[int]:
        """Return the numbers of steps whose update was skipped, each once; raise NonFinite after many in a row."""
        self.count_skipped()
        numbers, self._skips.known = self._skips.known, []
        for number in numbers:
            self._streak = [*self._streak, number] if number - 1 in self._streak[-1:] else [number]
            if self._ignores and len(self._streak) == MOST_SKIPPED:
                raise NonFinite(
                    f"the norm of gradients{self.error_suffix} is not finite in {MOST_SKIPPED} steps in a row, "
                    f"{self._streak[0]} to {number}, whose updates were left out (train.nonfinite: skip): look at the "
                    "loss, the data and the rate (train.optimizer.lr)"
                )
        return numbers

    def factor_on_device(self, lately_skipped: Tensor, done: int, rates: RateSchedule, steps: int) -> Tensor:
        """Return the schedule's factor after `done` of `steps` steps, some of which the device has skipped lately."""
        step = done - self.skipped
        if self._factors is None:
            first = step - self._skips.unread
            ahead = range(first, min(step + self.config.log.every, steps))
            self._factors = DeviceFactors([rates.factor(at, steps) for at in ahead], first, self.world.device)
        return self._factors.at(step, lately_skipped)

    def settle(self) -> None:
        """Copy pending losses into the window, all at once: one by one, each copy takes 6 us."""
        if not self._pending:
            return
        numbers, losses, norms = zip(*self._pending, strict=True)
        before = len(self._steps)
        self._steps += numbers
        self.window[0, before : len(self._steps)] = _as_tensor(losses)
        if norms[0] is not None:
            self.window[1, before : len(self._steps)] = _as_tensor(norms)
        self._pending.clear()

    def check_fp8(self) -> str:
        """Return what multiplied in the linear layers of the first step; raise Inconsistent if one has left fp8."""
        assert self.fp8_unchecked is not None
        linears, self.fp8_unchecked = self.fp8_unchecked, None
        return linears.check(self.module, self.world.device)

    @property
    def is_reported(self) -> bool:
        """Whether all steps so far are reported."""
        return not self._pending and not self._steps

    def report(self) -> float:
        """Return the global loss of the last step; raise NonFinite if a loss since the last report is not finite."""
        assert self._norm is not None
        self.settle()
        loss = self._reduce_loss(self.window[0, len(self._steps) - 1])
        rates = self.engine.learning_rates() or [float(base * self._factor) for base in self.rates]
        lr = rates[0] if len(set(rates)) == 1 else rates
        self.last = {"step": self._steps[-1], "loss": loss, "norm": float(self._norm), "lr": lr}
        self._steps.clear()
        return loss

    def finish(self) -> None:
        """Check the losses of steps that are not yet reported; called after the loop."""
        if not self.is_reported:
            self.settle()
            self._reduce_loss(self.window[0, : len(self._steps)].sum())

    def _reduce_loss(self, loss: Tensor) -> float:
        """Return the sum of `loss` over ranks; raise NonFinite if a rank had a bad loss since the last report."""
        bad = (~self.window[:, : len(self._steps)].isfinite()).any().to(torch.float64) * (not self._ignores)
        total, flag = self.world.sum(torch.stack([loss.to(torch.float64), bad])).tolist()
        if flag:
            raise self._non_finite_error()
        return total

    def _non_finite_error(self) -> UniparError:
        """Return an error with the first bad step, and the rank of a bad loss; every rank calls this together."""
        first = torch.full((2, self.world.size), math.inf, dtype=torch.float64)
        for row, bad in enumerate(~self.window[:, : len(self._steps)].isfinite().cpu()):
            if bad.any():
                first[row, self.world.rank] = self._steps[int(bad.nonzero()[0])]
        steps = self.world.sum(first.nan_to_num(posinf=0.0).to(self.world.device)).cpu()
        losses, norms = steps.masked_fill(steps == 0, math.inf)
        if norms.min() < losses.min():
            return self._bad_norm(int(norms.min()))
        return NonFinite(
            f"the loss{self.error_suffix} is not finite at step {int(losses.min())}, first on rank "
            f"{int(losses.argmin())}: look at that batch, the rate (train.optimizer.lr) and the clip (train.clip)"
        )

    def _bad_norm(self, number: int) -> UniparError:
        return NonFinite(
            f"the norm of gradients is not finite at step {number}{self.error_suffix}, so the weights stay as they "
            "were before it: look at the loss's gradient (a root or a logarithm at 0), the rate (train.optimizer.lr) "
            "and the clip (train.clip), or leave such updates out (train.nonfinite: skip)"
        )

    def record(self, steps: int) -> None:
        """Make room on the device for loss and norm of each of `steps` steps."""
        self._loss_and_norm = torch.zeros((2, steps), dtype=torch.float64, device=self.window.device)

    def recorded_steps(self) -> dict[str, list[Any]]:
        """Return this rank's share of the loss, the norm, and the number in the run of each recorded step."""
        assert self._loss_and_norm is not None
        losses, norms = self._loss_and_norm[:, : len(self._step_numbers)].tolist()
        return {"loss": losses, "norm": norms, "step": list(self._step_numbers)}


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [several for several in names.values() if len(several) > 1]


@final
class _SkippedSteps:
    """Numbers of steps whose update was skipped, of which the device knows the latest alone."""

    def __init__(self) -> None:
        self.known: list[int] = []
        self._numbers: list[int] = []
        self._flags: list[Tensor] = []

    @property
    def unread(self) -> int:
        """Number of steps of which the host does not know whether their update was skipped."""
        return len(self._numbers)

    def add(self, number: int, skipped: Tensor) -> None:
        """Keep whether a step's update was skipped."""
        self._numbers.append(number)
        self._flags.append(skipped.view(1))
        if len(self._flags) == _MAX_PENDING_STEPS:
            self._flags = [torch.cat(self._flags)]

    def read(self) -> None:
        """Wait for the device, and move the numbers of skipped steps to those that are known."""
        flags: list[bool] = torch.cat(self._flags).tolist()
        self.known += [number for number, skipped in zip(self._numbers, flags, strict=True) if skipped]
        self._numbers.clear()
        self._flags.clear()


_RATES = ("lr", "initial_lr")
"""Settings of a group that the schedule sets."""


def _is_plain(value: Any) -> bool:
    """Return whether JSON holds a value."""
    if isinstance(value, tuple | list):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


@final
class ActivePart:
    """Context manager of the part that takes a step: other parts get no gradients, and keep their buffers' values."""

    def __init__(self, trained: TrainedPart, parts: Mapping[str, TrainedPart]) -> None:
        self.trained = trained
        self._others = [part for part in parts.values() if part is not trained]
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.seeds = (list(parts).index(trained.name),) if self._others else ()
        """Numbers that make the random seed differ between several parts, besides run, step and microbatch."""

    def __enter__(self) -> None:
        for part in self._others:
            self._buffers += [(buffer, buffer.detach().clone()) for buffer in part.module.buffers()]
            part.set_trainable(False)

    def __exit__(self, *error: object) -> None:
        for part in self._others:
            part.set_trainable(True)
        if self._buffers:
            with torch.no_grad():
                for buffer, before in self._buffers:
                    buffer.copy_(before)
            self._buffers.clear()


def refuse_other_loss(loss: object, own: object, config: Config) -> None:
    """Raise TaskError if a pipeline is to run another loss than the task's, with which its stages were cut."""
    if config.parallel.pipeline > 1 and loss is not None and loss != own:
        raise TaskError(
            "run.step(loss=...) got another loss than the task's loss(), with which the stages of parallel.pipeline "
            "were cut and proved: let the task's loss() compute it, or leave parallel.pipeline out"
        )


def collect_step_values(parts: Mapping[str, TrainedPart]) -> dict[str, Any]:
    """Return loss, norm and rate of a logged step; for several parts, the sum of losses, the joint norm, and each.

    The rate is a number if all groups of the optimizer have one rate, else the list of the groups' rates.
    """
    rows = {name: part.last for name, part in parts.items() if part.last is not None}
    if len(parts) == 1:
        return {key: value for row in rows.values() for key, value in row.items() if key != "step"}
    loss, norm = sum(row["loss"] for row in rows.values()), math.hypot(*(row["norm"] for row in rows.values()))
    return {"loss": loss, "norm": norm, "parts": rows}


def collect_expert_tokens(parts: Mapping[str, TrainedPart]) -> dict[str, Any]:
    """Return how many tokens each expert got since the last call, by layer; all ranks call it together."""
    taken = (part.engine.take_expert_tokens() for part in parts.values())
    return {layer: tokens.to_row() for layers in taken for layer, tokens in layers.items()}


def flatten_logged_step(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the row of a logged step as a flat mapping of names to numbers, for trackers.

    Names are such as `loss/critic` for a part, `lr/0` for a group of the optimizer, and `lr/critic/0` for both. Values
    of experts are those of the least even layer.
    """
    flat = {key: value for key, value in row.items() if key not in ("parts", "memory", "flops_by", "experts")}
    if layers := row.get("experts", {}).values():
        worst = {"fullest": max, "entropy": min, "unused": max, "rank": max, "microbatch": max}
        flat |= {f"experts/{key}": choose(layer[key] for layer in layers) for key, choose in worst.items()}
    for phase in row.get("memory", []):
        flat[f"memory/{phase['name']}"] = phase["peak"]
    for name, part in row.get("parts", {}).items():
        flat |= {f"{key}/{name}": value for key, value in part.items() if key != "step"}
    for key in [key for key, value in flat.items() if isinstance(value, list)]:
        flat |= {f"{key}/{group}": rate for group, rate in enumerate(flat.pop(key))}
    return flat


def combine_recorded_parts(parts: Mapping[str, Mapping[str, list[Any]]], steps: int) -> dict[str, Any]:
    """Return the run's loss and norm at each step: of several parts the sum of their last losses and the joint norm."""
    if len(parts) == 1:
        return {key: row[key] for row in parts.values() for key in ("loss", "norm")}
    loss, norm = [0.0] * steps, [0.0] * steps
    for part in parts.values():
        at = [*part["step"], steps + 1]
        for i, (mine, its) in enumerate(zip(part["loss"], part["norm"], strict=True)):
            for step in range(at[i] - 1, at[i + 1] - 1):
                loss[step] += mine
                norm[step] = math.hypot(norm[step], its)
    return {"loss": loss, "norm": norm, "parts": parts}


def iterate_pieces(parts: Mapping[str, TrainedPart]) -> Iterator[Piece]:
    """Yield all pieces of state on this rank; with several parts, names begin with the part's."""
    for name, part in parts.items():
        for piece in part.engine.pieces():
            yield piece if len(parts) == 1 else replace(piece, name=f"{name}.{piece.name}")


def trained_piece_names(parts: Mapping[str, TrainedPart]) -> set[str]:
    """Return the names of trained parameters as pieces have them."""
    prefixes = {name: "" if len(parts) == 1 else f"{name}." for name in parts}
    return {f"{prefixes[name]}{mine}" for name, part in parts.items() for mine in part.state_names.trained}


def restore_parts(parts: Mapping[str, TrainedPart], read: Read) -> None:
    """Restore the state of all parts from `read`."""
    for name, part in parts.items():
        part.engine.restore(read if len(parts) == 1 else _PartRead(name, read))


@final
class _PartRead(Read):
    """A `Read` for one part of several."""

    def __init__(self, part: str, read: Read) -> None:
        self._part, self._read = part, read

    @override
    def __call__(self, name: str, kind: str, where: Region) -> Tensor:
        return self._read(f"{self._part}.{name}", kind, where)

    @override
    def fill(self, out: Tensor, name: str, kind: str, where: Region) -> None:
        self._read.fill(out, f"{self._part}.{name}", kind, where)

    @override
    def kinds(self, name: str) -> set[str]:
        return self._read.kinds(f"{self._part}.{name}")

    @override
    def has(self, name: str, kind: str) -> bool:
        return self._read.has(f"{self._part}.{name}", kind)

    @override
    def shape(self, name: str, kind: str) -> tuple[int, ...]:
        return self._read.shape(f"{self._part}.{name}", kind)


def _as_tensor(values: Sequence[Tensor | float]) -> Tensor:
    """Return numbers, or tensors of one each, as one tensor."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.stack(tensors) if tensors else torch.tensor(values, dtype=torch.float64)
