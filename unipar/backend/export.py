"""Training scripts without unipar: input and output of a backend's `script`, and the parts that all scripts share.

Each backend has a template: the script as its library's users would write it. A line that begins with `[clip]` is
kept if gradients are clipped, one that begins with `[!clip]` if they are not; `$name` is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from unipar.config import BatchSizes, Config
from unipar.config.sections.schedule import (
    Constant,
    InverseRoot,
    OneCycle,
    Polynomial,
    Schedule,
    Steps,
    WarmupStableDecay,
)
from unipar.errors import Unsupported

if TYPE_CHECKING:
    from unipar.backend.engine import Part

SCRIPT_LINE_WIDTH = 120
"""Longest line of a generated script."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Training that a script is to do: the settled config, and facts about the task's code."""

    config: Config
    sizes: BatchSizes
    cuda: bool
    steps: int
    origin: str
    """Name of the config's file."""

    task: str
    """Name of the task's class in task.py."""

    gives: frozenset[str]
    """Optional methods that the class defines."""

    loader: bool
    """True if data() returns a DataLoader."""

    taken: tuple[str, ...]
    """Further arguments of that DataLoader that the script passes on, such as worker_init_fn and timeout."""

    blocks: tuple[str, ...]
    parameters: int
    woken: tuple[str, ...] = ()
    """Modules to be put into training mode, which model() returns in eval mode; "" is the model itself."""

    cuts: tuple[str, ...] | None = None
    """Blocks with which the task lets the second and each further stage of a pipeline begin; None: it does not say."""

    load: Callable[[], tuple[Part, Callable[[int], list[Any]]]] | None = None
    """Function that creates the model with its values, for a script that depends on more than names, and returns with
    it a function that reads this many of the first microbatches."""

    autocast: bool = False
    """True if the loss is computed under PyTorch's autocast; a backend may leave that to its library."""


@dataclass(frozen=True)
class Script:
    """Files of a script's folder, and the words of the command that starts it; `$@` is replaced by further words."""

    files: Mapping[str, str]
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def render_template(text: str, flags: Mapping[str, bool], values: Mapping[str, str]) -> str:
    """Return the text of a template with its lines chosen and its names replaced.

    There are at most two blank lines in a row, and none at the end.
    """
    chosen: list[str] = []
    for line in text.splitlines():
        condition = re.match(r"\[([!\w ]+)\] ?", line)
        if condition is None:
            chosen.append(line)
        elif all(flags[word.lstrip("!")] != word.startswith("!") for word in condition[1].split()):
            chosen.append(line[condition.end() :])
    filled = Template("\n".join(chosen)).substitute(values)
    return re.sub(r"\n{4,}", "\n\n\n", filled).strip("\n") + "\n"


def read_template(package: str, name: str) -> str:
    """Return the text of a template file in a package."""
    return (files(package) / name).read_text("utf-8")


def fill_template(
    outline: Outline, package: str, name: str, flags: Mapping[str, bool], values: Mapping[str, str]
) -> str:
    """Return a backend's template filled in with its own flags and values and those that all scripts share."""
    return render_template(
        read_template(package, name), {**shared_flags(outline), **flags}, {**shared_values(outline), **values}
    )


def sample_files(outline: Outline) -> dict[str, str]:
    """Return the files that all scripts share, by name: which samples each rank reads."""
    text = render_template(read_template("unipar.backend", "samples.txt"), shared_flags(outline), {})
    if outline.sizes.tokens is None:
        return {"samples.py": text}
    return {"samples.py": text, "token_split.py": read_template("unipar.data", "token_split.py")}  # needs Python alone


def shared_flags(outline: Outline) -> dict[str, bool]:
    """Return the conditions of template lines that all scripts share, by name."""
    config = outline.config
    precision, gives = config.train.precision, outline.gives
    return {
        "cuda": outline.cuda,
        "clip": config.train.clipping is not None,
        "scheduled": has_schedule(config),
        "cosine": uses_math(config),
        "master": precision == "bf16-master",
        "moves": outline.cuda or precision in _BATCH_DTYPES,
        "weighs": "weight" in gives,
        "prepares": "prepare" in gives,
        "taken": bool(outline.taken),
        "wakes": bool(outline.woken),
        "accumulates": outline.sizes.varies or outline.sizes.accumulate > 1,
        "varies": outline.sizes.varies,
        "tokens": outline.sizes.tokens is not None,
        "default": "collate" not in gives and not outline.loader,
    }


_BATCH_DTYPES = {"fp64": "torch.float64", "bf16-master": "torch.bfloat16"}


def has_schedule(config: Config) -> bool:
    """Return whether the learning rate changes during the run."""
    schedule = config.train.schedule
    return schedule.name != "constant" or schedule.warmup > 0


def shared_values(outline: Outline) -> dict[str, str]:
    """Return the texts that replace `$name` in all scripts, by name."""
    flags = shared_flags(outline)
    args = outline.config.task.args if outline.config.task else {}
    cast = _BATCH_DTYPES.get(outline.config.train.precision)
    placed = ".double()" if cast == "torch.float64" else ""
    names = ["Batches", "mix", "seed_all", "seed_torch"]
    names += ["Weighed"] * flags["weighs"] + ["moved"] * flags["moves"]
    return {
        "task": outline.task,
        "origin": outline.origin,
        "names": ", ".join(sorted(names, key=lambda n: (n[0].islower(), n))),
        "group": "nccl" if outline.cuda else "gloo",
        "args": ", ".join(f"{k}={_literal(v)}" for k, v in args.items()),
        "constants": "\n".join(_constants(outline)),
        "functions": functions_code(outline),
        "placed": placed + (".to(device)" if outline.cuda else ""),
        "modes": "\n".join(f"    model{f'.get_submodule({name!r})' * bool(name)}.train()" for name in outline.woken),
        "groups": groups_code(outline),
        "optimizer": optimizer_code(outline),
        "batches": "\n".join(_batches(outline)),
        "batch": (f"moved(batch, device{f', {cast}' if cast else ''})") if flags["moves"] else "batch",
    }


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and '"' not in value else repr(value)


def optimizer_class_name(config: Config) -> str:
    """Return the name of the optimizer's class in torch.optim."""
    return config.train.optimizer.implementation.removeprefix("torch.optim:")


def optimizer_code(outline: Outline, *, split: bool = False) -> str:
    """Return the statement that creates the optimizer over `groups`."""
    words = ["groups", *optimizer_words(outline, split=split)]
    return format_call(f"    optimizer = torch.optim.{optimizer_class_name(outline.config)}", words)


def optimizer_words(outline: Outline, *, split: bool = False) -> list[str]:
    """Return the optimizer's arguments except the groups, as source code."""
    arguments = outline.config.train.optimizer.arguments("cuda" if outline.cuda else "cpu", split=split)
    texts = {name: repr(value) for name, value in arguments.items()} | {"lr": learning_rate_code(outline)}
    return [f"{name}={text}" for name, text in texts.items()]


def learning_rate_scale(outline: Outline) -> float:
    """Return the factor by which `train.lr_scale` multiplies the learning rate."""
    return outline.config.train.lr_scale.factor(outline.sizes.total)


def learning_rate_code(outline: Outline) -> str:
    """Return the learning rate as an expression of the script's constants."""
    return "LR" if learning_rate_scale(outline) == 1.0 else "LR * SCALE"


def groups_code(outline: Outline, *, listed: bool = False) -> str:
    """Return the statements that assign the optimizer's `groups`.

    `listed` turns each group's parameters into a list, for code that iterates over them more than once.
    """
    if "groups" in outline.gives:
        words = ["**group", *['"params": list(group["params"])'] * listed]
        words += ['"lr": group.get("lr", LR) * SCALE'] * (learning_rate_scale(outline) != 1.0)
        if len(words) == 1:
            return "    groups = list(task.groups(model))"
        one = f"{{{', '.join(words)}}} for group in task.groups(model)"
        return (
            f"    groups = [{one}]" if len(one) + 15 <= SCRIPT_LINE_WIDTH else f"    groups = [\n        {one}\n    ]"
        )
    trained = "[p for p in model.parameters() if p.requires_grad]"
    decay = outline.config.train.optimizer.decay
    if decay == "all":
        return f"    groups = {trained}"
    if decay == "transformers":
        return _TRAINERS_GROUPS
    return f"""    trained = {trained}
    groups: list[dict[str, Any]] = [
        {{"params": [p for p in trained if p.ndim > 1]}},
        {{"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}},
    ]"""


_TRAINERS_GROUPS = """    norms = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, nn.LayerNorm))
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            words, parts = ("bias", "layernorm", "rmsnorm"), name.lower().split(".")
            thin = name.startswith(norms) or any(word in name.lower() for word in words)
            thin = thin or any(part == "norm" or part.endswith("_norm") for part in parts)
            (rest if thin else decayed).append(p)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]"""
"""Statements with the rule of `unipar.model.parameter_groups`, which a script does not have."""


def _constants(outline: Outline) -> Iterator[str]:
    train, sizes = outline.config.train, outline.sizes
    yield f"SEED = {train.seed}"
    yield f"STEPS = {outline.steps}  # optimizer steps" + (f": {train.epochs} epochs" if train.epochs else "")
    yield from _size_constants(sizes)
    yield f"LOG_EVERY = {outline.config.log.every}"
    yield f"LR = {float(train.optimizer.lr)!r}"
    if (scale := learning_rate_scale(outline)) != 1.0:
        yield f"SCALE = {scale!r}  # of the rate, chosen for {train.lr_scale.base_batch_size} {sizes.unit} a step"
    if train.schedule.warmup:
        yield f"WARMUP = {train.schedule.warmup_steps(outline.steps)}  # steps"
    if train.clipping is not None:
        yield f"CLIP = {float(train.clipping.max)!r}  # the largest gradient norm"


def _size_constants(sizes: BatchSizes) -> Iterator[str]:
    if (limits := sizes.tokens) is None:
        yield f"TOTAL = {sizes.total}  # samples in one optimizer step, over all ranks"
        yield f"MICRO = {sizes.micro}  # samples in one forward pass on one rank"
        return
    yield f"TOKENS = {sizes.total}  # in one optimizer step at most, over all ranks and without padding"
    if limits.micro is None:
        yield f"ACCUMULATE = {limits.accumulate}  # forward passes on one rank in one optimizer step"
    else:
        how = "side by side" if limits.packed else "with padding"
        yield f"MICRO = {limits.micro}  # tokens in one forward pass on one rank at most, {how}"


def functions_code(outline: Outline) -> str:
    """Return the module of the loss and the functions that all scripts share."""
    loss = _LOSS_MIXED.replace("DEVICE", "cuda" if outline.cuda else "cpu") if outline.autocast else _LOSS
    rate = ["\n".join(_rate_code(outline.config, outline.steps))] if has_schedule(outline.config) else []
    return "\n\n".join([loss, *rate, _NOTE])


_LOSS = '''class Loss(nn.Module):
    """The model and its loss in one module, so that the wrapped forward covers all that the loss uses."""

    def __init__(self, task: Any, model: nn.Module) -> None:
        super().__init__()
        self.loss, self.model = task.loss, model

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)
'''
_LOSS_MIXED = _LOSS.replace(
    "        return self.loss(", '        with torch.autocast("DEVICE", torch.bfloat16):\n            return self.loss('
)
_NOTE = '''def note(row: dict[str, Any]) -> None:
    """Write a row as a line of JSON to the terminal and to log.jsonl."""
    line = json.dumps(row)
    print(line, flush=True)
    with Path("log.jsonl").open("w" if row["step"] == 1 else "a", encoding="utf-8") as log:
        log.write(f"{line}\\n")
'''


def uses_math(config: Config) -> bool:
    """Return whether the function of the learning rate calls Python's math."""
    return any("math." in line for line in _rate_code(config, 1))


def _rate_code(config: Config, steps: int) -> Iterator[str]:
    schedule = config.train.schedule
    yield "def rate(step: int) -> float:"
    yield '    """Return the factor on the learning rate at `step`, counted from 0."""'
    if isinstance(schedule, Steps):
        falls = (
            f"step // {schedule.every}" if schedule.every else f"sum(step >= at for at in {list(schedule.milestones)})"
        )
        rise = f"min(1.0, {_rise_code(schedule)}) * " if schedule.warmup else ""
        yield f"    return {rise}{float(schedule.gamma)!r} ** ({falls})"
        yield ""
        return
    if schedule.warmup:
        yield "    if step < WARMUP:"
        yield f"        return {_rise_code(schedule)}"
    if isinstance(schedule, Constant):
        yield "    return 1.0"
        yield ""
        return
    if isinstance(schedule, InverseRoot):
        since, scale = "step - WARMUP" if schedule.warmup else "step", schedule.steps_to_half(steps)
        yield f"    return math.sqrt({scale} / ({since} + {scale}))"
        yield ""
        return
    all_steps = "STEPS - 1" if schedule.timing == "own" else "STEPS"
    since, last = ("(step - WARMUP)", f"{all_steps} - WARMUP") if schedule.warmup else ("step", all_steps)
    shape, end = "linear", float(schedule.min_lr_ratio)
    if isinstance(schedule, OneCycle):
        shape, begin = schedule.shape, float(schedule.begin)
        yield f"    top = {schedule.pct_start!r} * STEPS - 1.0"
        yield "    if step <= top:"
        yield "        progress = step / top"
        yield f"        return 1.0 - {1.0 - begin!r} * {_REMAINING[shape]}"
        yield "    progress = (step - top) / (STEPS - 1 - top)"
    elif isinstance(schedule, WarmupStableDecay):
        shape, decay = schedule.shape, schedule.decay
        yield f"    progress = max(0.0, (step - ({all_steps}) + {decay}) / {decay})".replace("(STEPS)", "STEPS")
    else:
        shape = schedule.name
        yield f"    progress = {since} / max(1, {last})"
    left = _REMAINING["linear"] if isinstance(schedule, Polynomial) else _REMAINING[shape]
    power = f" ** {float(schedule.power)!r}" if isinstance(schedule, Polynomial) else ""
    over = f"{end!r} + {1.0 - end!r} * " if end else ""
    yield f"    return {over}{left}{power}"
    yield ""


def _rise_code(schedule: Schedule) -> str:
    """Return the factor at a step of the warm-up."""
    if schedule.timing == "own":
        return "(step + 1) / WARMUP"
    if isinstance(schedule, WarmupStableDecay) and schedule.min_lr_ratio:
        return f"{schedule.min_lr_ratio!r} + {1.0 - schedule.min_lr_ratio!r} * step / WARMUP"
    return "step / WARMUP"


_REMAINING = {
    "linear": "max(0.0, 1.0 - progress)",
    "cosine": "max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))",
    "sqrt": "max(0.0, 1.0 - math.sqrt(progress))",
}
"""Code of what is left of a decay, by its shape."""


def _batches(outline: Outline) -> Iterator[str]:
    data, source = outline.config.data, ["task.data()", "task.collate"]
    if "collate" not in outline.gives:
        source[1] = "default_collate"
    if outline.loader:
        yield "    data = task.data()"
        source[0] = "data.dataset"
        source[1] = source[1] if "collate" in outline.gives else "data.collate_fn"
    sizes = ["total=TOTAL", "micro=MICRO"]
    if (limits := outline.sizes.tokens) is not None:
        cut = ["micro=None", "accumulate=ACCUMULATE"] if limits.micro is None else ["micro=MICRO", "accumulate=None"]
        sizes = ["tokens=TOKENS", *cut, f"packed={limits.packed}", "length=task.length"]
    words = [*source, *sizes, "rank=rank", "ranks=ranks", "seed=SEED"]
    words += [f"shuffle={data.shuffle}", f"drop_last={data.last_batch == 'drop'}", f"workers={data.workers}"]
    words += [f"{name}=data.{name}" for name in outline.taken]
    if "weight" not in outline.gives:
        yield format_call("    batches = Batches", words)
        return
    yield format_call("    counted = Batches", words)
    yield "    batches = Weighed(counted, task.weight, total)"


def format_call(head: str, words: Sequence[str]) -> str:
    """Return a call as source code, broken over lines as a formatter does if it is too long for one."""
    one = f"{head}({', '.join(words)})"
    if len(one) <= SCRIPT_LINE_WIDTH:
        return one
    indent = head[: len(head) - len(head.lstrip())]
    two = f"{indent}    {', '.join(words)}"
    if len(two) <= SCRIPT_LINE_WIDTH:
        return f"{head}(\n{two}\n{indent})"
    return "\n".join([f"{head}(", *(f"{indent}    {word}," for word in words), f"{indent})"])


def constant_tuple(name: str, words: Sequence[str], comment: str) -> str:
    """Return a constant's assignment as source code, over several lines if it is too long for one; "" if empty."""
    if not words:
        return ""
    one = f"{name} = ({', '.join(words)}{',' * (len(words) == 1)})  # {comment}"
    return (
        one if len(one) <= SCRIPT_LINE_WIDTH else "\n".join([f"{name} = (", *(f"    {word}," for word in words), ")"])
    )


def format_json(values: Mapping[str, Any]) -> str:
    """Return the values as an indented JSON file."""
    return json.dumps(values, indent=2) + "\n"


def refuse_uncarried_options(backend: str, strategy: str, options: Mapping[str, Any], carried: frozenset[str]) -> None:
    """Raise Unsupported if options are given that the backend's template does not use."""
    unused = sorted(set(options) - carried)
    if unused:
        reasons = [f"options.{backend}.{name}: a script does not carry it; leave it out" for name in unused]
        raise Unsupported(strategy, reasons)
