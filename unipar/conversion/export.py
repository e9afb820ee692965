"""`unipar export`: the same training as a script for one library, which does not need unipar."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel
from typing_extensions import override

from unipar.backend import Backend, checks, registry, resources
from unipar.backend.checks import in_strategy
from unipar.backend.refusals import SCRIPT, conditions_of, refusals_met
from unipar.config import Config, Strategy
from unipar.errors import BackendNotFound, ConfigError, OutExists, TaskError, Unsupported
from unipar.task.reference import TaskRef
from unipar.task.task import LOSS_ACROSS, TASK_FUNCTIONS, Task
from unipar.utils.text import yaml_word

if TYPE_CHECKING:
    from unipar.backend.export import Outline, Script
    from unipar.config.config_source import ConfigSource
    from unipar.training.task_facts import TaskFacts

_EXPORTED_KEYS = (
    *("task", "backend", "device", "parallel.data", "parallel.shard", "batch", "model.blocks", "data", "options"),
    *("train.steps", "train.epochs", "train.optimizer", "train.lr_scale", "train.schedule", "train.precision"),
    *("train.seed", "train.clip", "log.every"),
)
_IGNORED_KEYS = {
    "eval": "the script trains, and does not evaluate",
    "log.to": "the script writes log.jsonl",
    "checkpoint": "the script does not save its state",
    "launch": "the script's launcher has its own time limits",
    "batch.memory_check": "the script does not try its largest microbatches before the first step",
    "compare": "",
    "out": "",
}
"""Keys that training does not depend on, with the note that the export prints where a config gives them."""

_README_MARK = "Made by `unipar export`"


@dataclass(frozen=True)
class ExportResult:
    """Folder that an export wrote, with its command and the keys that were left out."""

    folder: Path
    command: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]

    @override
    def __str__(self) -> str:
        rows = [("folder", str(self.folder)), ("files", ", ".join(self.files)), ("start", f"{self.folder}/run.sh")]
        rows += [("command", self.command), *(("left out", note) for note in self.left_out)]
        return "\n".join(f"{name:<8}  {text}" for name, text in rows)


def list_export_targets() -> dict[str, Backend]:
    """Return the backends that a config can be exported to, by their name in `--to`."""
    backends = [registry.find_backend(name) for name in registry.backend_names()]
    return {backend.exports: backend for backend in backends if backend.exports}


def export_script(source: ConfigSource, to: str, out: Path | None = None, *, overwrite: bool = False) -> ExportResult:
    """Write the folder with the script; raise Unsupported with a reason for each key that a script cannot carry."""
    known = list_export_targets()
    if to not in known:
        raise BackendNotFound(f"--to {to}: unknown target; known: {', '.join(sorted(known))}")
    backend = known[to]
    if source.config.task is None or source.config.task.use is None:
        raise TaskError(f"{source.label}: there is no task.use; export needs the class: task: {{use: file.py:Class}}")
    if source.config.batch.is_auto:
        raise ConfigError(
            f"{source.label}: batch.micro: auto is found by trial when a run starts, and a script has one size: say it "
            "with --set batch.micro=N; `unipar explain FILE` shows the one of an earlier run, and `unipar plan FILE "
            "--memory SIZE` what to expect"
        )
    if (axes := source.config.parallel.axes).split:
        source.config.batch.require_samples(
            f"a script in which ranks share the work ({axes}) reads batches of a fixed number of samples"
        )
    same = source.config.backend == backend.name
    source = checked = checks.check_names(source) if same else in_strategy(source, backend.name, "--to")
    checks.check_can_run(source.config)
    _refuse_unsupported_keys(source.config, checked.strategy, backend.exported_axes)
    folder = out or Path(f"{source.name}-{to}")
    _check_out_folder(folder, overwrite=overwrite)
    outline, files = _make_outline(source)
    script = backend.script(outline)
    for name in sorted(files.keys() & script.files.keys()):
        raise TaskError(f"{outline.task} imports {name}, and a script has a file of that name itself: rename yours")
    left_out = tuple(_ignored_key_notes(source))
    files = {**files, **script.files, "run.sh": _run_script_text(script)}
    files["README.md"] = _readme_text(source, to, outline, script, sorted(files), left_out)
    _write_folder(folder, files)
    return ExportResult(folder, _shell_command(script), tuple(sorted(files)), left_out)


def _refuse_unsupported_keys(config: Config, strategy: Strategy, axes: tuple[str, ...] = ()) -> None:
    """Raise Unsupported with a reason for each key that differs from its default and that a script cannot carry.

    `axes` are the keys of `parallel` that the script of this backend carries.
    """
    clip, carried = config.train.clipping, {f"parallel.{name}" for name in axes}
    reasons = [
        f"{key}: a script does not carry it; leave it out (--set {key}={yaml_word(default)})"
        for key, default in _unsupported_keys(config, Config.model_fields)
        if key not in carried
    ]
    if clip is not None and clip.norm != "fp32":
        reasons.append(
            f"train.clip.norm: {clip.norm} exists in unipar only; a script clips by the fp32 norm "
            f"(--set train.clip={clip.max:g})"
        )
    if config.train.precision == "fp16":
        reasons.append("train.precision: fp16 comes with a loss scale, which a script does not carry; use bf16-mixed")
    if config.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        reasons.append(f"device: {config.device}: scripts are written for the CPU and for CUDA; say device: cuda")
    elif ":" in config.device:
        reasons.append(f"device: {config.device}, one GPU for several ranks, exists in unipar only; say device: cuda")
    if reasons:
        raise Unsupported(str(strategy), reasons)


def _unsupported_keys(section: BaseModel, fields: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if key in _EXPORTED_KEYS or key in _IGNORED_KEYS:
            continue
        default = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel) and default is not None:
            yield from _unsupported_keys(value, type(value).model_fields, f"{key}.")
        elif value != default:  # also a section that is null by default, whatever is in it
            yield key, default


def _make_outline(source: ConfigSource) -> tuple[Outline, dict[str, str]]:
    """Return the outline of the script, and the user's files without unipar by their new names.

    The files are read before the task is imported, so that code that cannot be exported is refused without running it.
    """
    from unipar.backend.export import Outline
    from unipar.conversion.user_code import extract_user_code
    from unipar.training.task_facts import cuts_of_task, gather_task_facts, load_part, load_task

    config = source.config
    sizes = config.batch.settle(resources.count_ranks(config).number // config.parallel.axes.ranks)
    ref = TaskRef.of(None, config.task, {})
    ref.check_code()
    assert ref.task is not None
    file = _task_file(ref)
    files = extract_user_code(file, ref.task.name)
    facts = gather_task_facts(config, sizes)
    task = load_task(config, prepared=False)  # it was, for its facts
    for feature, value in _features(facts, task):
        reason, way_out = _TASK_REFUSALS[feature]
        raise TaskError(f"{ref.task.shown}: {reason.format(value=value)}: {way_out}")
    if refused := next(refusals_met(conditions_of(config) | {SCRIPT: ""}), None):
        raise ConfigError(refused)
    _check_bases(type(task), file)
    steps = config.train.steps or facts.steps
    assert steps is not None
    from_loader = {name: value for name, value in facts.data.items() if name not in config.data.model_fields_set}
    config = config.model_copy(update={"data": config.data.model_copy(update=from_loader)})
    outline = Outline(
        config=config,
        sizes=sizes,
        cuda=resources.choose_device(config)[0].startswith("cuda"),
        steps=steps,
        origin=Path(source.label).name,
        task=ref.task.name,
        gives=frozenset(name for name in (*TASK_FUNCTIONS, "prepare", "tensor") if task.defines(name)),
        loader=bool(facts.data),
        taken=facts.loader_arguments,
        blocks=facts.blocks,
        parameters=facts.parameters,
        woken=facts.modes.woken,
        cuts=cuts_of_task(task, config.parallel.axes.stages) if config.parallel.pipeline > 1 else None,
        load=partial(load_part, config, sizes),
    )
    return outline, files


_TASK_REFUSALS: Final[Mapping[str, tuple[str, str]]] = {
    "parts": (
        "model() returned several parts ({value}), and a script trains one module",
        "export a task whose model() returns one of them",
    ),
    "stream": (
        "data() returns a stream, and a script supports map-style datasets only",
        "export a task whose data() returns one",
    ),
    "sampler": (
        "data() returns a DataLoader with a sampler of its own ({value}), and a script draws the order by the seed",
        "export a task without it, and put yours into the loader of train.py",
    ),
    "train": (
        "train() is a loop over unipar's Run, which does not exist in a script",
        "export a task without train(), and write the loop into train.py",
    ),
    "optimizer": (
        "optimizer() creates the task's own optimizer, but a script creates the config's",
        "export a task without optimizer(), and create yours in train.py",
    ),
    "schedule": (
        "schedule() is the task's own, but a script computes the config's",
        "export a task without schedule(), and write yours into rate() of train.py",
    ),
    **dict.fromkeys(
        LOSS_ACROSS,
        (
            "loss_across() compares samples of the whole global batch, for which unipar computes features first, and a "
            "script computes the loss of one microbatch",
            "export a task whose loss is a mean, or train this one by unipar",
        ),
    ),
}
"""Reason and way out of each feature of a task that a script does not carry."""


def _features(facts: TaskFacts, task: Task) -> Iterator[tuple[str, str]]:
    """Yield the features of a task that a script does not carry, each with words for it."""
    values = {"parts": ", ".join(facts.parts), "stream": facts.stream_description, "sampler": facts.sampler}
    yield from ((feature, str(value)) for feature, value in values.items() if value)
    yield from ((name, name) for name in _TASK_REFUSALS if name not in values and task.defines(name))


def _task_file(ref: TaskRef) -> Path:
    from unipar.task.source_checks import find_module_file

    assert ref.task is not None
    file = Path(ref.task.file) if ref.task.file else find_module_file(str(ref.task.module), ref.path)
    assert file is not None  # check_code() has read it
    return file


def _check_bases(task_class: type, file: Path) -> None:
    """Raise TaskError where a base class comes from an installed module that imports unipar."""
    import inspect

    for base in task_class.__mro__:
        if base.__module__.partition(".")[0] in ("unipar", "builtins", "abc", "typing"):
            continue
        base_file = Path(inspect.getsourcefile(base) or "?").resolve()
        if base_file.parent != file.parent.resolve() and any(b.__module__.startswith("unipar.") for b in base.__mro__):
            raise TaskError(
                f"{task_class.__name__} derives from {base.__name__} in {base_file}, which a script cannot include: "
                f"write the code that it needs into {file.name}"
            )


def _ignored_key_notes(source: ConfigSource) -> Iterator[str]:
    for key, why in _IGNORED_KEYS.items():
        own_keys = [k for k in source.origins if k == key or k.startswith(f"{key}.")]
        if why and own_keys:
            yield f"{key}: {why}"


def _shell_command(script: Script) -> str:
    words = [f"{name}={value}" for name, value in script.environment.items()]
    return " ".join([*words, *(shlex.quote(word) for word in script.command if word != "$@")])


def _run_script_text(script: Script) -> str:
    return f"""#!/bin/sh
# Starts the training. Further arguments go to the launcher.
cd "$(dirname "$0")" || exit
{"".join(f"export {name}={value}{chr(10)}" for name, value in script.environment.items())}exec {
        " ".join('"$@"' if word == "$@" else shlex.quote(word) for word in script.command)
    }
"""


def _readme_text(
    source: ConfigSource, to: str, outline: Outline, script: Script, files: list[str], left_out: tuple[str, ...]
) -> str:
    about = {
        "train.py": "the loop",
        "task.py": "your model, data and loss",
        "samples.py": "which samples each rank reads, in which order",
        "token_split.py": "how samples are put into batches and microbatches by their tokens",
        "run.sh": "the command",
        **{name: "config of the library" for name in script.files if not name.endswith(".py")},
    }
    for name in script.files.keys() - about.keys():
        first_line = script.files[name].partition("\n")[0].strip('".')
        about[name] = first_line[0].lower() + first_line[1:]
    listed = [f"- `{name}`: {about.get(name, 'your module')}" for name in files]
    lines = [
        f"# {outline.task} with {to}",
        "",
        f"{_README_MARK} from `{outline.origin}`. Nothing in this folder needs unipar.",
        "",
    ]
    lines += ["```console", f"$ {_shell_command(script)}", "```", "", *listed, ""]
    lines.append(
        "It gives the same losses as `unipar run`: the same initial values, the same samples in the same order, the "
        "same rate at each step. `log.jsonl` holds the losses, one line for each logged step."
    )
    if left_out:
        lines += ["", "Left out:", "", *(f"- {note}" for note in left_out)]
    return "\n".join([*lines, ""])


def _check_out_folder(folder: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or folder.is_symlink():
        raise OutExists(f"--out: {folder} is not a folder; name another")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise OutExists(
            f"--out: {folder} already exists; name another folder (--out DIR), or write over it (--overwrite)"
        )
    try:
        ours = _README_MARK in (folder / "README.md").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise OutExists(
            f"--out: {folder} was not written by `unipar export`, so it is not overwritten; name another folder"
        )


def _write_folder(folder: Path, files: dict[str, str]) -> None:
    """Write all files or none: write them into a temporary folder beside `folder`, and rename it at the end."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as e:
        raise ConfigError(f"--out: {folder} cannot be written ({e.strerror}); name another folder") from None
    try:
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        (partial / "run.sh").chmod(0o755)
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"--out: {folder} cannot be written ({e.strerror}); name another folder") from None
