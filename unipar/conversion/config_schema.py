"""The config as JSON Schema, from which editors know its keys, and the file of it beside a new config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from unipar.backend import registry
from unipar.config import Config
from unipar.config.job_system import find_job_system, job_system_names
from unipar.errors import ConfigError

SCHEMA_FILE: Final = "unipar.schema.json"
"""Name of the file beside a new config, whose first line names it."""


def schema_text() -> str:
    """Return the JSON Schema of a config, with the options of every known backend."""
    backends = [registry.find_backend(name) for name in registry.backend_names()]
    optional = [b for b in backends if b.options.model_fields]
    systems = {name: find_job_system(name).options for name in job_system_names()}
    models = (Config, *(b.options for b in optional), *systems.values())
    refs, definitions = models_json_schema([(m, "validation") for m in models])
    config = definitions["$defs"].pop("Config")
    config["properties"]["options"] |= {
        "properties": {b.name: refs[b.options, "validation"] for b in optional},
        "additionalProperties": {"type": "object"},
    }
    machines = definitions["$defs"]["Machines"]
    machines["properties"] |= {name: refs[options, "validation"] for name, options in systems.items()}
    machines["additionalProperties"] = False
    machines["properties"]["on"]["examples"] = list(systems)
    config["properties"]["backend"]["examples"] = [b.name for b in backends]
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A unipar config",
        **{key: value for key, value in config.items() if key != "title"},
        **definitions,
    }
    return json.dumps(_simplify_schema(schema), indent=2, ensure_ascii=False) + "\n"


def write_schema(file: Path) -> None:
    """Write the JSON Schema to `file`."""
    try:
        file.write_text(schema_text(), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{file} cannot be written: {e.strerror}") from None


def write_schema_beside(config: Path) -> str:
    """Write the schema that the first line of a new config names; return a line on both files."""
    schema = config.with_name(SCHEMA_FILE)
    write_schema(schema)
    return f"written: {config}, and {schema} for editors"


def _simplify_schema(node: Any) -> Any:
    """Remove the generated titles, and turn `oneOf` into `anyOf`: where `name` has a default it may be left out."""
    if isinstance(node, list):
        return [_simplify_schema(x) for x in node]
    if not isinstance(node, dict):
        return node
    simple = {"anyOf" if key == "oneOf" else key: _simplify_schema(value) for key, value in node.items()}
    if isinstance(simple.get("title"), str) and "$schema" not in simple:
        del simple["title"]
    if isinstance(simple.get("description"), str):
        simple["description"] = " ".join(simple["description"].partition("\nExamples:\n")[0].split())
    return simple
