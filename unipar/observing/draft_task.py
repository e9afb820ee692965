"""First draft of a task and of its config, from what was seen of a script: `unipar observe --to task`."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, final

from unipar.conversion.config_schema import write_schema_beside
from unipar.errors import OutExists, ReportError, UniparError
from unipar.observing.draft_config import DraftConfig, main_optimizer, optimizer_name
from unipar.observing.script_source import ScriptSource, TakenCode
from unipar.results.observed_rank import ObservedRank, read_observed_ranks
from unipar.results.observed_recipe import Recipe, SeenObject
from unipar.utils.files import is_library_file, write_file_atomically
from unipar.utils.text import count_of

DRAFT_TASK_FILE: Final = "task.py"
DRAFT_CONFIG_FILE: Final = "task.yaml"
_WIDTH: Final = 110


def try_write_draft(folder: Path) -> str:
    """Write a draft and return what is printed about it, or why there is none; never raise."""
    try:
        return write_draft(folder, overwrite=True)
    except Exception as e:  # the results are written already and must still be shown
        return f"no draft: {e}" if isinstance(e, UniparError) else f"no draft: {type(e).__name__}: {e}"


def write_draft(folder: Path, *, overwrite: bool = False) -> str:
    """Write task.py and task.yaml into the folder of an observed command; return what is printed about them."""
    earlier = next((file for file in (folder / DRAFT_TASK_FILE, folder / DRAFT_CONFIG_FILE) if file.exists()), None)
    if earlier is not None and not overwrite:
        raise OutExists(f"{earlier} exists: give --overwrite to replace the draft, with what you wrote into it")
    rank = next(read_observed_ranks(folder), None)
    if rank is None or rank.recipe is None or rank.recipe.model is None:
        raise ReportError(
            f"{folder} holds no rank of a command observed by `unipar observe` that trains a model, of which a draft "
            "could be written; run the command again: unipar observe --to task -- COMMAND"
        )
    draft = TaskDraft(rank, rank.recipe, folder)
    config = DraftConfig(rank, rank.recipe).text(f"{DRAFT_TASK_FILE}:{draft.name}", draft.script)
    task = draft.text()
    write_file_atomically(folder / DRAFT_TASK_FILE, task)
    write_file_atomically(folder / DRAFT_CONFIG_FILE, config)
    write_schema_beside(folder / DRAFT_CONFIG_FILE)
    left = sum(text.count("# to do:") for text in (task, config))
    where = Path(os.path.relpath(folder)) / DRAFT_CONFIG_FILE
    first = f"`to do:` marks {count_of(left, 'place')} to fill in" if left else "read what `guess:` marks"
    return f"draft: {folder / DRAFT_TASK_FILE} and {folder / DRAFT_CONFIG_FILE}\n{first}, then: unipar verify {where}"


@final
class TaskDraft:
    """Text of a task, with what it imports and copies."""

    def __init__(self, rank: ObservedRank, recipe: Recipe, folder: Path) -> None:
        self._rank, self._recipe, self._folder = rank, recipe, folder
        self.script = Path(recipe.script).name or "the script"
        callers = recipe.loss.callers if recipe.loss is not None else ()
        self._source = ScriptSource.read(recipe.script, recipe.arguments, callers)
        model = recipe.model
        assert model is not None
        self._model = model
        self.name = f"{model.name.rpartition('.')[2].strip('_')}Task"
        self._imports: dict[str, None] = {}
        self._copied: dict[str, str] = {}
        self._folders: dict[str, None] = {}

    def text(self) -> str:
        """Return the file."""
        methods = [
            self._model_method(),
            self._data_method(),
            *self._collate_method(),
            self._loss_method(),
            *self._optimizer_methods(),
        ]
        body = "\n\n".join(textwrap.indent("\n".join(lines), "    ") for lines in methods)
        copied = [f"# copied from {self.script}\n{text}" for text in self._copied.values()]
        path = list(self._path_lines())
        head = [
            f'"""First draft of a task, made by `unipar observe --to task` from what was seen of {self.script}.',
            "",
            "`guess:` marks what may be wrong, `to do:` what was not seen; everything else was seen.",
            '"""',
            "",
            *(["import sys", "from pathlib import Path", ""] if path else []),
            *([*path, ""] if path else []),
            *_grouped({"import unipar", *self._imports}),
        ]
        parts = ["\n".join(head), *copied, f"class {self.name}(unipar.Task):\n{body}"]
        return "\n\n\n".join(parts) + "\n"

    def _path_lines(self) -> Iterator[str]:
        for folder in self._folders:
            where = Path(os.path.relpath(folder, self._folder)).as_posix()
            yield f"sys.path.append(str((Path(__file__).parent / {where!r}).resolve()))  # modules of {self.script}"

    # Methods

    def _model_method(self) -> list[str]:
        model, head = self._model, "def model(self):"
        made = model.made
        seen = f"    # {_class_of(model)}, {self._rank.parameters:,} parameters"
        seen += f", made in line {made.line} of {Path(made.file).name}" if made is not None else ""
        if self._recipe.pretrained:
            return [head, seen, *self._returned(model, "guess: with the weights that it was loaded with")]
        if model.expression:
            return [head, seen, *self._returned(model, "")]
        taken = self._taken_value(model)
        return [head, seen, *(taken or self._gap(f"make it; not known: {'; '.join(model.unknown)}"))]

    def _data_method(self) -> list[str]:
        head, loader = "def data(self):", self._recipe.loader
        if loader is None:
            return [head, *self._gap("return the dataset; the script has no loader of torch that was seen")]
        data = loader.dataset
        size = f", {loader.samples:,} samples" if loader.samples is not None else ""
        seen = [f"    # {_class_of(data)}{size}"]
        if loader.wrapped_in:
            seen.append(f"    # to do: the script takes a part of it, by {' in '.join(loader.wrapped_in)}")
        if data.expression:
            return [head, *seen, *self._returned(data, "")]
        taken = self._taken_value(data, "DataLoader")
        return [head, *seen, *(taken or self._gap("return the dataset of all ranks, unsplit"))]

    def _collate_method(self) -> Iterator[list[str]]:
        loader = self._recipe.loader
        if loader is None or loader.collate is None:
            return
        head, collate = "def collate(self, samples):", loader.collate
        if collate.expression:
            self._take_imports(collate)
            call = f"{collate.expression}(samples)"
            yield [head, f"    return {call}"]
            return
        taken = self._value_of(collate)
        if taken is None:
            yield [head, *self._gap(f"return a batch, as {_class_of(collate)} makes it")]
            return
        self._take(taken)
        taken.lines.append(f"return ({taken.lines.pop().removeprefix('return ')})(samples)")
        yield [head, *self._body(taken)]

    def _loss_method(self) -> list[str]:
        head, recipe = "def loss(self, model, batch):", self._recipe
        loss, source = recipe.loss, self._source
        accumulates = max(self._rank.backwards, default=1) > 1
        code = None
        if loss is not None and source is not None:
            code = source.loss_at(loss.place.line, loss.models, loss.others, accumulates=accumulates)
        what = "return the mean loss over the batch"
        if "labels" in recipe.batch_keys and code is None:  # a library calls backward
            why = "    # guess: the batch has labels, so that the model returns the loss"
            return [head, why, "    return model(**batch).loss"]
        if loss is None or code is None or loss.place.file != recipe.script:
            where = f", as before line {loss.place.line} of {Path(loss.place.file).name}" if loss else ""
            return [head, *self._gap(f"{what}{where}")]
        origin, *body = self._body(code)
        if code.missing:
            quoted = [f"    # {line.strip()}" for line in body]
            names = ", ".join(dict.fromkeys(code.missing))
            return [head, origin, *quoted, *self._gap(f"{what}; not known here: {names}")]
        self._take(code)
        return [head, origin, *body]

    def _optimizer_methods(self) -> Iterator[list[str]]:
        recipe = self._recipe
        if not recipe.optimizers:
            return
        seen = main_optimizer(recipe)
        if optimizer_name(seen) is None and not recipe.library_config.get("optimizer"):
            groups = ("lr", "weight_decay", "initial_lr")  # task.yaml says them
            own = {key: value for key, value in seen.settings.items() if key not in groups and value is not None}
            arguments = "".join(f", {key}={value!r}" for key, value in own.items())
            kind = SeenObject(name=seen.name, module=seen.module, imports={seen.name: seen.module})
            self._take_imports(kind)
            yield [
                "def optimizer(self, groups):",
                "    # guess: its settings are arguments of its class",
                f"    return {seen.name}(groups{arguments})",
            ]
        if seen.decay == "own" or any(group.keys() - {"weight_decay"} for group in seen.groups):
            settings = "; ".join(str(group or "as in task.yaml") for group in seen.groups)
            yield [
                "def groups(self, model):",
                f"    # the script's groups differ from task.yaml by: {settings}",
                *self._gap("return the groups in PyTorch's form, with every trained parameter"),
            ]

    # Lines

    def _gap(self, what: str) -> list[str]:
        first, *more = textwrap.wrap(f"to do: {what}", _WIDTH)
        return [f"    # {first}", *(f"    # {line}" for line in more), f"    raise NotImplementedError({first!r})"]

    def _returned(self, thing: SeenObject, note: str) -> list[str]:
        if not self._take_imports(thing):
            return self._gap(f"make it: {thing.expression}, whose names are in {self.script}")
        return [*([f"    # {note}"] if note else []), *_wrapped_call(thing.expression)]

    def _taken_value(self, thing: SeenObject, call: str = "") -> list[str] | None:
        """Return lines that return what a variable of the script holds, or the first argument of its only such call."""
        code = self._value_of(thing, call)
        if code is None:
            return None
        self._take(code)
        return self._body(code)

    def _value_of(self, thing: SeenObject, call: str = "") -> TakenCode | None:
        made = thing.made
        if self._source is None:
            return None
        if thing.variable and made is not None and made.file == self._recipe.script:
            code = self._source.value_of(thing.variable, made.line)
        else:
            code = self._source.argument_of(call) if call else None
        return None if code is None or code.missing else code

    def _body(self, code: TakenCode) -> list[str]:
        """Return lines of the script as those of a method, the first of which says where they come from."""
        lines = f"line {code.first}" if code.first == code.last else f"lines {code.first} to {code.last}"
        return [f"    # guess: {lines} of {self.script}", *textwrap.indent("\n".join(code.lines), "    ").splitlines()]

    def _take(self, code: TakenCode) -> None:
        """Import and copy what lines of the script need."""
        self._imports |= code.imports
        self._copied |= code.copied
        folder = Path(self._recipe.script).parent
        for line in code.imports:
            top = line.split()[1].partition(".")[0]
            if (folder / f"{top}.py").is_file() or (folder / top).is_dir():
                self._folders[str(folder)] = None

    def _take_imports(self, thing: SeenObject) -> bool:
        """Import what an expression needs; return whether all of it is known."""
        for name, module in thing.imports.items():
            if module == "__main__":
                code = TakenCode() if self._source is None else self._source.definition(name)
                if self._source is None or code.missing:
                    return False
                self._take(code)
                continue
            self._imports[f"from {module} import {name}" if module else f"import {name}"] = None
            file = thing.files.get(module, "")
            if file and not is_library_file(file):
                up = len(module.split(".")) - (0 if Path(file).name == "__init__.py" else 1)
                self._folders[str(Path(file).parents[up])] = None
        return True


def _class_of(thing: SeenObject) -> str:
    return thing.name if thing.module == "__main__" else f"{thing.module}.{thing.name}"


def _grouped(imports: Iterable[str]) -> list[str]:
    """Return imports in order, those from one module in one line."""
    names: dict[str, list[str]] = {}
    for line in sorted(imports):
        module, _, name = line.partition(" import ")
        if name and module != "from __future__":
            names.setdefault(module, []).append(name)
    whole = [line for line in sorted(imports) if line.startswith("import ")]
    return [*whole, *(f"{module} import {', '.join(together)}" for module, together in sorted(names.items()))]


def _wrapped_call(expression: str) -> list[str]:
    """Return lines that return a call, with an argument on each line if it is long."""
    first, *more = _call_lines(ast.parse(expression, mode="eval").body)
    return [f"    return {first}", *(f"    {line}" for line in more)]


def _call_lines(node: ast.expr) -> list[str]:
    text = ast.unparse(node)
    if len(text) <= _WIDTH or not isinstance(node, ast.Call):
        return [text]
    lines = [f"{ast.unparse(node.func)}("]
    for name, value in [*(("", a) for a in node.args), *((f"{k.arg}=", k.value) for k in node.keywords)]:
        first, *more = _call_lines(value)
        inner = [f"{name}{first}", *more]
        lines += [*(f"    {line}" for line in inner[:-1]), f"    {inner[-1]},"]
    return [*lines, ")"]
