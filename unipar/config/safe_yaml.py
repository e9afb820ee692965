"""Safe YAML: reads text to plain values and the line of every key; cannot construct objects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml
from typing_extensions import override
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

MAX_YAML_VALUES = 10_000
"""Largest number of values in a file, with its aliases expanded."""

MAX_YAML_DEPTH = 32
"""Largest number of levels of nesting."""

KeyPath = tuple[str, ...]
_TAG_PREFIX = "tag:yaml.org,2002:"


class YamlError(Exception):
    """Error in a YAML text: its line, and a sentence."""

    def __init__(self, line: int, sentence: str) -> None:
        super().__init__(line, sentence)
        self.line, self.sentence = line, sentence


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """Loader that composes a tree of nodes; it has no constructor, so a tag cannot create an object."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._values = self._depth = 0

    @override
    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: Any = self.peek_event()
        line = event.start_mark.line + 1
        if tag := getattr(event, "tag", None):
            shown = tag.replace(_TAG_PREFIX, "!!")
            raise YamlError(line, f"the tag {shown} is refused: a config holds plain values only")
        self._values += 1
        self._depth += 1
        _check_limits(line, self._values, self._depth)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


# the scalars of YAML 1.2 without ambiguous ones: `on`, `yes` and 010 are text, 3e-4 is a number
for _kind, _pattern, _first in (
    ("null", r"^(?:~|null|)$", ["~", "n", ""]),
    ("bool", r"^(?:true|false)$", ["t", "f"]),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|nan|Inf|NaN))$",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG_PREFIX + _kind, re.compile(_pattern), _first)


def parse_yaml(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the document in `text` and the line of each of its keys; raise YamlError if the text is invalid."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise YamlError(line, f"the character U+{ord(text[e.position]):04X} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as e:
        raise YamlError(*_line_and_problem(e)) from None
    finally:
        if loader is not None:
            loader.dispose()
    if node is None:
        return None, {}
    tree = _ValueBuilder()
    return tree.value(node, (), ()), tree.lines


def _line_and_problem(e: yaml.MarkedYAMLError) -> tuple[int, str]:
    mark = e.problem_mark or e.context_mark
    problem = str(e.problem or e.context)
    if "expected a single document" in str(e.context):
        problem = "a second document begins here; a config has only one"
    elif "'\\t'" in problem:
        problem = "a tab cannot indent; use spaces"
    return (mark.line + 1 if mark else 1), problem


def _check_limits(line: int, values: int, depth: int) -> None:
    if values > MAX_YAML_VALUES:
        raise YamlError(
            line, f"more than {MAX_YAML_VALUES:,} values with aliases expanded; a config is smaller than that"
        )
    if depth > MAX_YAML_DEPTH:
        raise YamlError(line, f"nested more than {MAX_YAML_DEPTH} levels deep")


class _ValueBuilder:
    """Conversion of nodes into plain values; remembers the line of each key."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._values = 0

    def value(self, node: Node, path: KeyPath, above: tuple[Node, ...]) -> Any:
        """Return the plain value of a node under `path`; `above` are the nodes that contain it."""
        self._values += 1
        line = node.start_mark.line + 1
        if any(node is x for x in above):
            raise YamlError(line, "an alias that contains itself")
        _check_limits(self.lines.get(path[:1], line), self._values, len(above) + 1)
        if isinstance(node, MappingNode):
            return {key: self.value(child, (*path, key), (*above, node)) for key, child in self._items(node, path)}
        if isinstance(node, SequenceNode):
            for i, child in enumerate(node.value):
                self.lines[*path, str(i)] = child.start_mark.line + 1
            return [self.value(child, (*path, str(i)), (*above, node)) for i, child in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return _scalar_value(node, line)

    def _items(self, node: MappingNode, path: KeyPath) -> Iterator[tuple[str, Node]]:
        first_lines: dict[str, int] = {}
        for name, child in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, ScalarNode) or name.tag != _TAG_PREFIX + "str":
                shown = name.value if isinstance(name, ScalarNode) else "a list or a mapping"
                raise YamlError(line, f"a key must be text, got {shown or 'nothing'}; put it in quotes if it is text")
            key = name.value
            if key == "<<":
                raise YamlError(line, "merge keys (<<) are not supported; write the keys out")
            if key in first_lines:
                raise YamlError(line, f"the key {key!r} is given twice, first in line {first_lines[key]}; remove one")
            first_lines[key] = line
            self.lines[*path, key] = line
            yield key, child


def _scalar_value(node: ScalarNode, line: int) -> Any:
    text = node.value
    match node.tag.removeprefix(_TAG_PREFIX):
        case "null":
            return None
        case "bool":
            return text == "true"
        case "int":
            if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
                raise YamlError(line, f"the number {text[:24]}{'...' * (len(text) > 24)} does not fit into 64 bits")
            return int(text)
        case "float":
            number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            if not math.isfinite(number):
                raise YamlError(line, f"the number {text} is not finite")
            return number
        case _:
            return text
