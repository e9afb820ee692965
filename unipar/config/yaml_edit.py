"""Changes of single keys in the text of a config, whose comments and order stay."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from unipar.config import safe_yaml


class CannotEdit(Exception):
    """Error of a text in which a key cannot be changed alone, such as one behind an alias."""


def change_keys(text: str, changes: Mapping[str, Any]) -> str:
    """Return the text of a config with other values under dotted keys; keys that are not there are added."""
    for key, value in changes.items():
        text = _change(text, key.split("."), value)
    return text


def yaml_value(value: Any) -> str:
    """Return a plain value in one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_][\w./*+-]*", value) and safe_yaml.parse_yaml(value)[0] == value
        return value if plain else json.dumps(value)
    return json.dumps(value)


def _change(text: str, path: Sequence[str], value: Any) -> str:
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)  # plain values only, as safe_yaml has found when it was read
    if node is None:
        return f"{text}{_nested(path, value)}\n"
    for depth, name in enumerate(path):
        if not isinstance(node, MappingNode):
            raise CannotEdit(".".join(path))
        pair = next((pair for pair in node.value if pair[0].value == name), None)
        if pair is None:
            return _insert(text, node, path[depth:], value)
        node = pair[1]
        if isinstance(node, ScalarNode) and (depth == len(path) - 1 or node.value in ("", "null", "~")):
            rest = path[depth + 1 :]
            new = yaml_value(value) if not rest else "{" + _nested(rest, value) + "}"
            return _replace(text, node, new)
    raise CannotEdit(".".join(path))


def _nested(path: Sequence[str], value: Any) -> str:
    first, *rest = path
    return f"{first}: " + ("{" + _nested(rest, value) + "}" if rest else yaml_value(value))


def _replace(text: str, node: Node, new: str) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    gap = " " if start == end and text[start - 1 : start] == ":" else ""
    return f"{text[:start]}{gap}{new}{_comment_in_place(text[end:], len(gap + new) - (end - start))}"


def _comment_in_place(rest: str, longer: int) -> str:
    """Return what follows a value that got longer by so much, with a comment in its line in its old column."""
    comment = re.match(r"( +)#", rest)
    return rest if comment is None else " " * max(1, len(comment[1]) - longer) + rest[len(comment[1]) :]


def _insert(text: str, node: MappingNode, path: Sequence[str], value: Any) -> str:
    line = _nested(path, value)
    if node.flow_style:
        if not node.value:
            place = node.end_mark.index - 1
            return f"{text[:place]}{line}{text[place:]}"
        place = node.value[-1][1].end_mark.index
        return f"{text[:place]}, {line}{text[place:]}"
    first = node.value[0][0].start_mark
    if first.column == 0:
        return f"{text}{'' if text.endswith(chr(10)) else chr(10)}{line}\n"
    place = first.index - first.column
    return f"{text[:place]}{' ' * first.column}{line}\n{text[place:]}"
