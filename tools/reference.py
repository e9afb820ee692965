"""Tables of docs/config.md and docs/cli.md, made from the schema of configs and the commands: `make reference`.

Each table stands between two marks: `<!-- reference: keys -->` and `<!-- end of reference -->`. Text outside of the
marks is written by hand. `--check` writes nothing, and exits with 1 if a page differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from unipar import errors
from unipar.cli.app import COMMANDS, build_app
from unipar.config.foreign_words import FOREIGN_KEYS, FOREIGN_STRATEGIES, FOREIGN_VALUES
from unipar.conversion.config_schema import schema_text

DOCS = Path(__file__).parents[1] / "docs"
OURS = {"accelerate", "deepspeed", "horovod", "native", "single", "slurm", "kubernetes", "ray", "mpi"}
"""Backends and job systems of this repository; those of other installed packages stay out of the pages."""

SEE = {
    "task": "[Write a task](tasks.md)",
    "parallel": "[Strategies](#strategies), [Backends](backends.md), [The mesh](mesh.md)",
    "batch": "[Batch arithmetic](#batch-arithmetic), [Write a task](tasks.md), [Memory](memory.md)",
    "model": "[Weights from a file](tasks.md), [Memory](memory.md)",
    "data": "[Write a task](tasks.md)",
    "train": "[Schedules](#schedules), [Averages](checkpoints.md), [Optimizers](memory.md), [Verify](verify.md)",
    "eval": "[Write a task](tasks.md)",
    "log": "[Runs and tracking](runs.md)",
    "checkpoint": "[Checkpoints](checkpoints.md)",
    "launch": "[Launchers](launchers.md)",
    "machines": "[Launchers](launchers.md)",
    "compare": "[Choose a strategy](strategies.md)",
}
"""Pages that say more about a section."""

COMMANDS_SEE = {
    "run": "[Checkpoints](checkpoints.md), [Launchers](launchers.md), [Precedence of values](config.md#precedence)",
    "compare": "[Choose a strategy](strategies.md)",
    "scale": "[Choose a strategy](strategies.md)",
    "submit": "[Launchers](launchers.md)",
    "jobs": "[Launchers](launchers.md)",
    "runs": "[Runs and tracking](runs.md)",
    "report": "[Choose a strategy](strategies.md)",
    "verify": "[How verify decides](verify.md)",
    "checkpoint": "[Checkpoints](checkpoints.md)",
    "plan": "[Memory and plan](memory.md)",
    "export": "[Import and export](import-export.md)",
    "import": "[Import and export](import-export.md)",
    "backends": "[Backends](backends.md)",
    "doctor": "[Launchers](launchers.md)",
    "install": "[Backends](backends.md#horovod)",
}
"""Pages that say more about a command."""

MARKS = re.compile(r"(<!-- reference: ([a-z-]+) -->\n)(.*?)(<!-- end of reference -->)", re.DOTALL)
Node = Mapping[str, Any]


def cell(text: str) -> str:
    """Return a text as it stands in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table, and an empty line."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(cell, row))} |"
    yield ""


class Schema:
    """The config's JSON Schema, read section by section."""

    def __init__(self) -> None:
        self.root: Node = json.loads(schema_text())
        self.definitions: Mapping[str, Node] = self.root["$defs"]

    def resolved(self, node: Node) -> Node:
        """Return the section that a reference names, or the node itself."""
        return self.definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def choices(self, node: Node) -> list[Node]:
        """Return the schemas of which a value must fit one."""
        return [each for inner in node["anyOf"] for each in self.choices(inner)] if "anyOf" in node else [node]

    def sections(self, node: Node) -> list[Node]:
        """Return the sections that a key can have as its value."""
        return [section for each in self.choices(node) if "properties" in (section := self.resolved(each))]

    def type_of(self, node: Node) -> str:
        """Return the type of a value in a few words."""
        words = [self._word(each) for each in self.choices(node)]
        return ", ".join(dict.fromkeys(word for word in words if word))

    def _word(self, node: Node) -> str:
        node = self.resolved(node)
        if "properties" in node:
            return "section"
        if "const" in node or "enum" in node:
            return ", ".join(f"`{value_text(value)}`" for value in node.get("enum", [node.get("const")]))
        kind = {
            "string": "text",
            "boolean": "`true`, `false`",
            "array": "list",
            "object": "mapping",
            "null": "`null`",
        }.get(node["type"], str(node["type"]))
        return kind + self._bounds(node)

    @staticmethod
    def _bounds(node: Node) -> str:
        signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
        if node.get("type") not in ("integer", "number"):
            return ""
        return "".join(f" {sign} {number(node[key])}" for key, sign in signs.items() if key in node)

    def default_of(self, node: Node, required: bool) -> str:
        """Return the default of a key, or an empty text if the key must be given."""
        if required:
            return "required"
        if "default" in node:
            return f"`{value_text(node['default'])}`"
        return "`{}`" if any(each.get("type") == "object" for each in self.choices(node)) else "`[]`"


def with_values_as_code(text: str, kind: str) -> str:
    """Return a description with the values that it explains, as in `null: never`, in code."""
    values = [value for value in re.findall(r"`([^`]+)`", kind) if re.fullmatch(r"[\w-]+", value)]
    for value in (*values, "null"):
        text = re.sub(rf"(?:(?<=^)|(?<=[.;:,] )){value}(, {value})*(?=: )", rf"`{value}`", text)
    return text


def number(value: float) -> str:
    """Return a number as a config has it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_text(value: Any) -> str:
    """Return a value in YAML's notation, on one line."""
    match value:
        case dict():
            return f"{{{', '.join(f'{key}: {value_text(one)}' for key, one in value.items())}}}"
        case list():
            return f"[{', '.join(map(value_text, value))}]"
        case str():
            return f'"{value}"' if value.startswith("*") else value
        case float():
            return number(value)
        case _:
            return json.dumps(value)


class Rows:
    """Rows of a section's table; a key that means the same under several names of a choice has one row."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.names: dict[tuple[str, str, str, str], list[str]] = {}
        """Names of the choice (such as adamw) in which a row holds, by row."""
        self.choices: list[list[str]] = []
        """Names of each choice."""

    def add(self, section: Node, prefix: str, name: str = "") -> None:
        """Add the keys of a section and of the sections in it."""
        for key, node in section["properties"].items():
            path = f"{prefix}.{key}"
            sections = self.schema.sections(node)
            choice = [one for one in sections if "const" in one["properties"].get("name", {})]
            if key == "name" and "const" in node:
                continue
            if choice and path.startswith("train.parts."):
                self.row(path, "section, `null`", node, section, name)
                continue
            if choice:
                self._choice(path, node, choice)
                continue
            row_type = self.schema.type_of(node)
            self.row(path, row_type, node, section, name)
            for inner in sections:
                self.add(inner, path, name)
            for inner in [node.get("additionalProperties", {})]:
                for one in self.schema.sections(inner) if isinstance(inner, dict) else ():
                    self.add(one, f"{path}.NAME", name)

    def _choice(self, path: str, node: Node, choice: list[Node]) -> None:
        names = [one["properties"]["name"]["const"] for one in choice]
        self.choices.append(names)
        default = node["default"]["name"]
        kinds = " ".join(
            f"`{name}`: {one['properties']['name']['description']}" for name, one in zip(names, choice, strict=True)
        )
        self.names[f"`{path}.name`", ", ".join(f"`{n}`" for n in names), f"`{default}`", kinds] = []
        for name, one in zip(names, choice, strict=True):
            self.add(one, path, name)
        for row, under in self.names.items():
            if under and row[0].startswith(f"`{path}.") and set(under) == set(names):
                self.names[row] = []

    def row(self, path: str, kind: str, node: Node, section: Node, name: str) -> None:
        description = node.get("description") or self.schema.resolved(node).get("description", "")
        key = path.rpartition(".")[2]
        default = self.schema.default_of(node, key in section.get("required", ()))
        if kind == "section":
            default = ""
        row = (f"`{path}`", kind, default, description)
        self.names.setdefault(row, [])
        if name and name not in self.names[row]:
            self.names[row].append(name)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table; rows of one key stand together."""
        first = {row[0]: place for place, row in reversed(list(enumerate(self.names)))}
        rows = [
            (key, kind, default, self._scope(names) + with_values_as_code(text, kind))
            for (key, kind, default, text), names in sorted(self.names.items(), key=lambda row: first[row[0][0]])
        ]
        yield from table(("key", "type", "default", "meaning"), rows)

    def _scope(self, names: list[str]) -> str:
        """Return the words that say for which names of a choice a row holds, or "" if it holds for all."""
        every = next((choice for choice in self.choices if set(names) <= set(choice)), ())
        others = [name for name in every if name not in names]
        if not names:
            return ""
        shown = others if len(others) < len(names) else names
        return f"{'All but' if shown is others else 'With'} {', '.join(f'`{name}`' for name in shown)}. "


def keys() -> Iterator[str]:
    """Yield a table of every key of each section."""
    schema = Schema()
    top = Rows(schema)
    plain, sections = {}, {}
    for key, node in schema.root["properties"].items():
        if key == "options":
            continue
        (sections if schema.sections(node) else plain)[key] = node
    yield "### Top level"
    yield ""
    yield "Beside these keys a config has the sections below."
    yield ""
    for key, node in plain.items():
        top.row(key, schema.type_of(node), node, schema.root, "")
    yield from top.lines()
    for key, node in sections.items():
        yield f"### {key}"
        yield ""
        yield f"{node['description']}{f' More: {links}.' if (links := SEE.get(key)) else ''}"
        yield ""
        rows = Rows(schema)
        for section in schema.sections(node):
            if key == "machines":
                section = {**section, "properties": {k: v for k, v in section["properties"].items() if k not in OURS}}
            rows.add(section, key)
        yield from rows.lines()
    machines = schema.sections(schema.root["properties"]["machines"])[0]["properties"]
    yield from plugin_sections(schema, "machines", machines)
    yield from plugin_sections(schema, "options", schema.root["properties"]["options"]["properties"])


def plugin_sections(schema: Schema, key: str, nodes: Mapping[str, Node]) -> Iterator[str]:
    """Yield a table for each of our plugins' sections below a key."""
    for name in sorted(OURS & set(nodes)):
        rows = Rows(schema)
        rows.add(schema.resolved(nodes[name]), f"{key}.{name}")
        yield f"### {key}.{name}"
        yield ""
        yield from rows.lines()


def commands() -> Iterator[str]:
    """Yield each command with its text, examples, arguments and options."""
    program: Any = typer.main.get_command(build_app())
    for name in COMMANDS:
        yield from described(name, program.commands[name])


def described(name: str, command: Any) -> Iterator[str]:
    """Yield a command, and the commands of a group."""
    links = COMMANDS_SEE.get(name)
    yield f"### unipar {name}"
    yield ""
    for paragraph in re.sub(r"\x08\n\n?", "\x08", command.help.strip()).split("\n\n"):
        if paragraph.startswith("\x08"):
            lines = paragraph.strip("\x08\n").splitlines()
            yield "```yaml" if lines[0].startswith("machines:") else "```sh"
            yield from lines
            yield "```"
        else:
            yield from options_as_code(paragraph).splitlines()
        yield ""
    if links:
        yield f"More: {links}."
        yield ""
    rows = [row for parameter in command.params if (row := parameterrow(parameter))]
    if rows:
        yield from table(("argument or option", "default", "meaning"), rows)
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from described(f"{name} {inner_name}", inner)


def parameterrow(parameter: Any) -> tuple[str, str, str] | None:
    """Return the row of an argument or an option."""
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return None
    if "Argument" in type(parameter).__name__:
        spelled = f"`{parameter.metavar}`"
    else:
        *others, last = (f"`{name}`" for name in parameter.opts)
        spelled = ", ".join([*others, last if parameter.metavar is None else f"{last[:-1]} {parameter.metavar}`"])
    default = "required" if parameter.required else ""
    if parameter.default not in (None, False, [], ()) and not parameter.required:
        default = f"`{parameter.default}`"
    return spelled, default, options_as_code(parameter.help or "")


def options_as_code(text: str) -> str:
    """Return a help text with its options, such as --set, in code."""
    return re.sub(r"(?<![\w`-])(--?[a-zA-Z][\w-]*)(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", r"`\1`", text)


def exit_codes() -> Iterator[str]:
    """Yield the table of exit codes, each with the errors that have it."""
    meanings = {
        0: "success",
        1: "a run failed, or an unexpected error",
        2: "the config, the task or the command is wrong",
        3: "the backend or this machine cannot do it",
        130: "stopped by a signal at a step boundary, or by Ctrl-C",
    }
    besides = {
        1: "in `compare`, `scale` and `verify`: a strategy or number of ranks that failed or disagrees; in `doctor`, "
        "`checkpoint verify` and `checkpoint diff`: a failed check or a difference",
        2: "an unknown option or a missing argument",
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UniparError)]
    rows = []
    for code, meaning in meanings.items():
        names = [f"`{kind.__name__}`" for kind in kinds if kind.code == code and kind is not errors.UniparError]
        rows.append((str(code), meaning, "; ".join(filter(None, (", ".join(names), besides.get(code, ""))))))
    yield from table(("code", "meaning", "errors"), rows)


def words() -> Iterator[str]:
    """Yield a table of each library's words, with what to write for them here."""
    tables = {
        **FOREIGN_KEYS,
        **{f"Values of {key}": answers for key, answers in FOREIGN_VALUES.items()},
        "Strategies": FOREIGN_STRATEGIES,
    }
    for name, answers in tables.items():
        rows = [
            (", ".join(f"`{word}`" for word in theirs.split()), answer.removeprefix("write "))
            for theirs, answer in answers.items()
        ]
        yield f"### {name}"
        yield ""
        yield from table(("their word", "write"), rows)


PARTS: Mapping[str, Callable[[], Iterator[str]]] = {
    "keys": keys,
    "commands": commands,
    "exit-codes": exit_codes,
    "words": words,
}
PAGES = ("config.md", "cli.md")


def rewritten(page: str) -> str:
    """Return a page with its tables made anew."""
    return MARKS.sub(lambda mark: "\n".join([mark[1], *PARTS[mark[2]](), mark[4]]), page)


def main() -> int:
    """Write the pages, or compare them; return the exit code."""
    old = {name: (DOCS / name).read_text("utf-8") for name in PAGES}
    stale = [name for name, text in old.items() if rewritten(text) != text]
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/{name} is not what `make reference` writes")
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(rewritten(old[name]), "utf-8")
        print(f"written: docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
