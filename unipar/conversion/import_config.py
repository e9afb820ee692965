"""`unipar import`: a config of unipar from another library's config; a key that cannot be carried is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unipar.backend import Backend, checks, registry
from unipar.backend.checks import CheckedSource, given_source
from unipar.backend.foreign import Answers, ForeignConfigReader, import_error
from unipar.config import Config
from unipar.config.config_file import read_mapping_file
from unipar.config.config_source import parse_set_argument
from unipar.config.sections.optimizer import OPTIMIZERS, AdamW
from unipar.config.yaml_edit import yaml_value
from unipar.conversion.argument_names import EIGHT_BIT_OPTIMIZERS, EIGHT_BITS
from unipar.conversion.config_schema import SCHEMA_FILE
from unipar.conversion.given_arguments import arguments_over, read_arguments
from unipar.conversion.trainer_file import READ_HERE, is_trainer_file, library_arguments, read_trainer_file
from unipar.conversion.training_arguments import RefusedArgument, TrainingArguments
from unipar.errors import ConfigError, OutExists, Unsupported
from unipar.utils.files import whole
from unipar.utils.text import show_value

_LENGTH_QUESTION = "how long to train, which the file does not say"
_NAME = "train.optimizer.name"
_SCHEDULE = "train.schedule.name"
_COMMENT_COLUMN = 48
"""Column at which comments begin in the imported config."""


@dataclass(frozen=True)
class ImportedConfig:
    """Config of unipar that was made from another library's file."""

    text: str
    """The config as YAML, with comments."""

    config: Config
    left_out: tuple[str, ...]
    """Keys of the file on which training does not depend, each with the reason."""

    read: frozenset[str] = frozenset()
    """Keys of the file whose values were read."""

    assumed: tuple[str, ...] = ()
    """Keys that neither the file nor its reader gave, with the Trainer's defaults that they have now."""


def import_library_config(
    file: Path,
    sets: Sequence[str] = (),
    *,
    world: int | None = None,
    leave: Sequence[str] = (),
    args: str | None = None,
    strict: bool = False,
) -> ImportedConfig:
    """Return the config made from `file`; raise ConfigError that names every key that cannot be carried.

    What the file leaves to the script is taken from `args` or assumed, and asked for if `strict`.
    """
    data, lines = read_mapping_file(file)
    overrides = dict(parse_set_argument(text) for text in sets)
    reading = ForeignConfigReader(str(file), file.resolve().parent, lines, overrides, frozenset(leave), world)
    reading.strict = strict
    arguments, whole_file = read_arguments(args), is_trainer_file(data, _best_reader(data)[0])
    if whole_file:
        arguments = arguments_over(data, arguments.given, READ_HERE | library_arguments())
    answers = arguments.answers()
    if strict:
        answers = replace(answers, by_key={k: a for k, a in answers.by_key.items() if a.from_user})
    reading.answers = None if strict and args is None and not whole_file else answers
    if whole_file:
        backend = read_trainer_file(reading, data, lambda path: read_mapping_file(path)[0], _find_reader)
    else:
        backend = _find_reader(file, data)
        backend.read_foreign(reading, data)
    _add_given_answers(reading, answers)
    _add_refused_arguments(reading, arguments, strict=strict)
    reading.left_out += arguments.left_out
    reading.read |= arguments.usual
    if not any(reading.answered(key) or key in reading.config for key in ("train.steps", "train.epochs")):
        reading.ask(_LENGTH_QUESTION, "train.steps", "1000")
    if reading.assumed or arguments.given:
        for key in ("train.schedule", "train.seed"):
            reading.assume(key)
    if strict and arguments.given and _SCHEDULE not in reading.config:
        reading.ask("lr_scheduler_type", _SCHEDULE, "linear")
    _carry_trainers_rules(reading, arguments, answers)
    reading.wrong += [f"--leave {key}: the file has no such key" for key in sorted(reading.leave - reading.used)]
    if reading.wrong:
        raise import_error(reading)
    tree = _nest_reading(reading)
    source = given_source(tree)
    reasons = list(checks.list_refusals(source.backend, source.config, source.strategy))
    if reasons and not reading.answered("device") and "device" not in reading.config:
        reading.put("device", "cuda", "the file is for GPUs, and this machine has none")
        on_gpu = given_source(_nest_reading(reading))
        if not list(checks.list_refusals(on_gpu.backend, on_gpu.config, on_gpu.strategy)):
            tree, source, reasons = _nest_reading(reading), on_gpu, []
    if reasons:
        raise Unsupported(str(source.strategy), reasons)
    if _add_eight_bits(reading, arguments, source):
        tree = _nest_reading(reading)
        source = given_source(tree)
    config = source.config
    if isinstance(config.parallel.data, int):
        config.batch.settle(config.parallel.data)
    for key, answer in answers.by_key.items():
        if answer.usual and reading.notes.get(key) == answer.why:
            del reading.notes[key]
    kind = " with ".join([*["training arguments"] * whole_file, *([backend.imports] if backend else [])])
    text = _config_text(f"{file.name}, {kind}", reading, tree)
    left_out, assumed = tuple(reading.left_out), tuple(reading.assumed)
    return ImportedConfig(text, config, left_out, read=frozenset(reading.read), assumed=assumed)


def _add_given_answers(reading: ForeignConfigReader, answers: Answers) -> None:
    """Add what `--args` say beyond the file; where both say something else, that is a mistake."""
    length = ("train.steps", "train.epochs")
    for key, answer in answers.by_key.items():
        if not answer.from_user or reading.answered(key):
            continue
        if key in reading.config:
            if reading.config[key] != answer.value and reading.notes.get(key) != answer.why:
                reading.wrong.append(
                    f"{key}: the file says {show_value(reading.config[key])}, {answer.why} is "
                    f"{show_value(answer.value)}; choose with --set {key}=..."
                )
        elif key.startswith("batch.") and "batch.total" in reading.config:
            reading.omit(answer.why, "the file says train_batch_size")
        elif key in length and any(reading.answered(k) or k in reading.config for k in length):
            reading.omit(answer.why, "the length of training is said already")
        elif answer.value is not None:
            reading.put(key, answer.value, answer.why)


def _add_refused_arguments(reading: ForeignConfigReader, arguments: TrainingArguments, *, strict: bool) -> None:
    """Add what cannot be carried; and, unless `strict`, tell what is carried though it means something else."""
    assumed = arguments.assumed
    if strict and (word := arguments.eight_bits):
        why = f"{word}: unipar has {EIGHT_BITS}, {EIGHT_BIT_OPTIMIZERS[word]}; or adamw, with states in fp32"
        assumed = [*assumed, RefusedArgument(arguments.names.get("optim", "optim"), why, "give adamw_torch", _NAME)]
    for refusal in (*arguments.refused, *(assumed if strict else ())):
        if not arguments.source:
            reading.refuse(refusal.name, refusal.why, refusal.ours)
        elif refusal.ours is not None and reading.answered(refusal.ours):
            reading.omit(arguments.place(refusal.name), f"{refusal.why} (replaced by --set {refusal.ours})")
        else:
            reading.wrong.append(arguments.sentence(refusal))
    if not strict:
        reading.assumed += [
            f"{refusal.ours}: {refusal.why}"
            for refusal in arguments.assumed
            if refusal.ours is not None and not reading.answered(refusal.ours)
        ]


def _add_eight_bits(reading: ForeignConfigReader, arguments: TrainingArguments, source: CheckedSource) -> bool:
    """Return whether AdamW was put into 8 bits, as the arguments ask, where the strategy can; tell either."""
    word = arguments.eight_bits
    if not word or reading.answered(_NAME) or reading.notes.get(_NAME) != arguments.place("optim"):
        return False  # --set or the library's own config says which optimizer it is
    if (why := _why_no_eight_bits(reading, source)) is not None:
        reading.assumed.append(f"{_NAME}: {word}: AdamW with states in fp32, not in 8 bits: {why}")
        return False
    reading.put(_NAME, EIGHT_BITS, f"{word}, {EIGHT_BIT_OPTIMIZERS[word]}")
    reading.assumed.append(f"{_NAME}: {word}: {EIGHT_BITS}, {EIGHT_BIT_OPTIMIZERS[word]}")
    return True


def _why_no_eight_bits(reading: ForeignConfigReader, source: CheckedSource) -> str | None:
    """Return why the strategy has no moments of 8 bits, or what `--set` gives AdamW besides; None without a reason."""
    try:
        tried = given_source(_nest_reading(replace(reading, config={**reading.config, _NAME: EIGHT_BITS})))
    except ConfigError as e:
        return str(e)
    refused = next(checks.list_refusals(source.backend, tried.config, source.strategy), None)
    if refused is None:
        return None
    return refused.removeprefix(f"{_NAME}: {EIGHT_BITS} is not available").lstrip(": ").partition(";")[0]


def _carry_trainers_rules(reading: ForeignConfigReader, arguments: TrainingArguments, answers: Answers) -> None:
    """Add which parameters decay and where the rates begin and end, if optimizer and schedule are the Trainer's."""
    result = {**reading.config, **reading.overrides}
    applies, decays = bool(arguments.given) and reading.asks_for_optimizer, result.get("train.optimizer.weight_decay")
    by_element = not OPTIMIZERS.get(str(result.get(_NAME)), AdamW).whole_matrices
    if applies and decays and "train.optimizer" not in reading.overrides and by_element:
        reading.put("train.optimizer.decay", "transformers")
    answer, word = answers.by_key.get(_SCHEDULE), reading.config.get(_SCHEDULE)
    if answer is None or reading.answered(_SCHEDULE) or reading.notes.get(_SCHEDULE) != answer.why:
        return
    if word not in ("constant", "inverse-root") or result.get("train.schedule.warmup"):
        reading.put("train.schedule.timing", "transformers")


def write_config(text: str, out: Path, *, overwrite: bool = False) -> None:
    """Write a config's text to `out`, as a whole or not at all; never follow a symbolic link."""
    if out.is_symlink():
        raise OutExists(f"{out}: it is a link; name the file itself with -o")
    if out.exists() and (out.is_dir() or not overwrite):
        way = "" if out.is_dir() else ", or write over it (--overwrite)"
        raise OutExists(f"{out}: it already exists; name another file with -o{way}")
    try:
        with whole(out) as partial:
            partial.write_text(text, encoding="utf-8")
            partial.chmod(0o644)
    except OSError as e:
        raise ConfigError(f"{out}: it cannot be written ({e.strerror}); name another file with -o") from None


def _best_reader(data: Mapping[str, Any]) -> tuple[int, Backend | None]:
    """Return the backend whose library knows the most keys of a file, and how many it knows."""
    readers = [b for b in map(registry.find_backend, registry.backend_names()) if b.imports]
    counted = sorted(((len(b.foreign_keys() & data.keys()), b.imports, b) for b in readers), key=lambda c: c[:2])
    return (counted[-1][0], counted[-1][2]) if counted else (0, None)


def _find_reader(file: Path, data: Mapping[str, Any]) -> Backend:
    """Return the backend whose library knows the most keys of the file."""
    number, backend = _best_reader(data)
    if backend is None or not number:
        known = sorted(b.imports for b in map(registry.find_backend, registry.backend_names()) if b.imports)
        kinds = " or ".join([", ".join(known), "a file of training arguments"])
        raise ConfigError(f"{file}: none of its keys is known; give {kinds}")
    return backend


def _nest_reading(reading: ForeignConfigReader) -> dict[str, Any]:
    """Return the carried keys and those of `--set` as nested sections."""
    return nest_keys(reading.config | dict(reading.overrides))


def nest_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested sections, in the order of the config's fields."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        into = tree
        *above, last = key.split(".")
        for name in above:
            below = into.get(name)
            into[name] = into = below if isinstance(below, dict) else {}
        into[last] = {**into[last], **value} if isinstance(value, dict) and isinstance(into.get(last), dict) else value
    order = list(Config.model_fields)
    return dict(sorted(tree.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _config_text(origin: str, reading: ForeignConfigReader, tree: Mapping[str, Any]) -> str:
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# Made by `unipar import` from {origin}.",
        f"# For an editor that knows the keys: unipar schema --write {SCHEMA_FILE}",
        *(["#", "# Left out:"] if reading.left_out else []),
        *(f"#   {note}" for note in reading.left_out),
        *(["#", "# Not in the file, and assumed: see the remarks below."] if reading.assumed else []),
        "",
    ]
    if "task" not in tree:
        lines += ["# task: {use: train.py:YourTask}    # the class with your model, data and loss", ""]
    notes = {**reading.notes, **dict.fromkeys(reading.overrides, "--set")}
    return "\n".join([*lines, *yaml_lines(tree, notes), ""])


def yaml_lines(tree: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "", indent: str = "") -> Iterator[str]:
    """Yield the lines of nested sections, with remarks on dotted keys."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        note = notes.get(key, "")
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:" + (f"  # {note}" if note else "")
            yield from yaml_lines(value, notes, f"{key}.", f"{indent}  ")
        else:
            line = f"{indent}{name}: {yaml_value(value)}"
            yield f"{line.ljust(_COMMENT_COLUMN)}# {note}" if note else line
