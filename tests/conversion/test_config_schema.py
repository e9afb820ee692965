"""The JSON Schema: current, described, and complete to every backend's options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unipar.config import Config
from unipar.config.validation_errors import list_known_keys
from unipar.conversion.config_schema import schema_text, write_schema
from unipar.errors import ConfigError

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs/config.schema.json"
OURS = {"accelerate", "deepspeed", "horovod", "native", "single"}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return json.loads(schema_text())


def ours(whole: dict[str, Any]) -> dict[str, Any]:
    """Less what strangers' backends, installed beside ours, add."""
    whole = json.loads(json.dumps(whole))
    whole["properties"]["backend"]["examples"] = sorted(OURS)
    options = whole["properties"]["options"]["properties"]
    for name in set(options) - OURS:
        del whole["$defs"][options.pop(name)["$ref"].rpartition("/")[2]]
    return whole


def test_the_committed_schema_is_current(made: dict[str, Any]) -> None:
    """Else: unipar schema --write docs/config.schema.json"""
    assert json.loads(COMMITTED.read_text("utf-8")) == ours(made)


def properties(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        for name, one in node.get("properties", {}).items():
            yield f"{path}.{name}", one
        for key, inner in node.items():
            yield from properties(inner, f"{path}.{key}")


def test_every_key_is_described(made: dict[str, Any]) -> None:
    """The docstring below a field is what an editor shows; options of a backend describe themselves."""
    silent = [path for path, one in properties(made) if "description" not in one and "$ref" not in one]
    assert silent == []


def test_unknown_keys_are_refused_at_every_depth(made: dict[str, Any]) -> None:
    """The schema refuses unknown keys, as the program does."""
    sections = {"Config": made, **made["$defs"]}
    assert [name for name, s in sections.items() if s.get("additionalProperties") is not False] == []


def test_options_of_every_backend(made: dict[str, Any]) -> None:
    """Options stand under the backend's name; options of unknown backends are allowed, too."""
    options = made["properties"]["options"]
    assert OURS - {"single"} <= set(options["properties"])
    assert options["additionalProperties"] == {"type": "object"}
    buckets = made["$defs"]["DeepSpeedOptions"]["properties"]["buckets"]
    assert buckets["enum"] == ["scaled", "library"]
    assert buckets["description"].startswith("scaled: a sixteenth of the model's parameters")


def test_a_choice_by_name_may_leave_the_name_out(made: dict[str, Any]) -> None:
    """`oneOf` would refuse {lr: 0.1}, which fits every optimizer."""
    assert "oneOf" not in json.dumps(made)
    refs = [one["$ref"] for one in made["$defs"]["Train"]["properties"]["optimizer"]["anyOf"]]
    names = ("SGD", "Adam", "AdamW", "RMSprop", "AdamWBf16Settings", "AdamW8bitSettings", "MuonSettings")
    assert refs == [f"#/$defs/{name}" for name in names]


def test_it_says_what_it_is(made: dict[str, Any]) -> None:
    """Dialect and title are there for editors and validators."""
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["required"] == ["batch", "train"]


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda f: f.name)
def test_configs_name_the_schema(file: Path) -> None:
    """The modeline in their first line leads an editor to the committed file."""
    line = file.read_text("utf-8").splitlines()[0]
    found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", line)
    assert found
    assert (file.parent / found[1]).resolve() == COMMITTED


def test_write_where_nothing_can_be_written(tmp_path: Path) -> None:
    """The path, and the system's reason."""
    with pytest.raises(ConfigError) as e:
        write_schema(tmp_path / "nowhere" / "x.json")
    assert str(e.value) == f"{tmp_path}/nowhere/x.json cannot be written: No such file or directory"


def test_the_page_on_configs_holds_every_key() -> None:
    """docs/config.md is complete: a key that is not in it is not documented."""
    page = (ROOT / "docs/config.md").read_text("utf-8")
    leaves = set(list_known_keys(Config))
    leaves -= {above for key in leaves if (above := key.rpartition(".")[0])} - {"train.clip"}
    assert sorted(key for key in leaves - {"options"} if f"`{key}`" not in page) == []
