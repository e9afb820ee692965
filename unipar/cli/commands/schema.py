"""`unipar schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.json_schema import models_json_schema

from unipar.backend import registry
from unipar.config import Config
from unipar.errors import ConfigError


def build_schema(
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Into a file instead.")] = None,
) -> None:
    """The config as JSON Schema, for editors.

    \b
    unipar schema
    unipar schema --write docs/config.schema.json
    """
    from unipar.cli.commands.schema import schema_text as made
    from unipar.cli.commands.schema import write_schema

    if write is None:
        typer.echo(made(), nl=False)
    else:
        write_schema(write)


def schema_text() -> str:
    """Of a config, with the options of every backend known."""
    backends = [registry.find_backend(name) for name in registry.backend_names()]
    optional = [b for b in backends if b.options.model_fields]
    refs, made = models_json_schema([(m, "validation") for m in (Config, *(b.options for b in optional))])
    whole = made["$defs"].pop("Config")
    whole["properties"]["options"] |= {
        "properties": {b.name: refs[b.options, "validation"] for b in optional},
        "additionalProperties": {"type": "object"},
    }
    whole["properties"]["backend"]["examples"] = [b.name for b in backends]
    told = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A unipar config",
        **{key: value for key, value in whole.items() if key != "title"},
        **made,
    }
    return json.dumps(_simplify_schema(told), indent=2, ensure_ascii=False) + "\n"


def write_schema(file: Path) -> None:
    try:
        file.write_text(schema_text(), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--write {file}: {e.strerror}") from None


def _simplify_schema(node: Any) -> Any:
    """Without generated titles; and `anyOf` for a choice by `name`, which may be left out where there is a default."""
    if isinstance(node, list):
        return [_simplify_schema(x) for x in node]
    if not isinstance(node, dict):
        return node
    made = {"anyOf" if key == "oneOf" else key: _simplify_schema(value) for key, value in node.items()}
    if isinstance(made.get("title"), str) and "$schema" not in made:
        del made["title"]
    if isinstance(made.get("description"), str):
        made["description"] = " ".join(made["description"].split())
    return made
