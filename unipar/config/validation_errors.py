"""Conversion of pydantic's errors into sentences with key, line, wanted value, given value and suggestion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo

from unipar.config.config import Config
from unipar.config.foreign_words import advise_on_key, advise_on_value
from unipar.config.sections.section import Section
from unipar.utils.text import did_you_mean, join_with_and, join_with_or, show_value

KeyOrigins = Mapping[str, str]
"""Origin of each dotted key: "line 12", "--set"."""


def list_mistakes(error: ValidationError, where: KeyOrigins | None = None) -> list[str]:
    """Return a sentence for each mistake in a config."""
    return _describe(error, Config, "", where or {})


def list_option_mistakes(
    error: ValidationError, options: type[Section], section: str, where: KeyOrigins | None = None
) -> list[str]:
    """Return a sentence for each mistake in a plugin's options, which are in this section: options.native."""
    return _describe(error, options, section, where or {})


def list_section_mistakes(error: ValidationError, section: type[Section], where: KeyOrigins | None = None) -> list[str]:
    """Return a sentence for each mistake in a file that holds this section alone."""
    return _describe(error, section, "", where or {})


def join_mistakes(sentences: Sequence[str]) -> str:
    """Return the sentence, or a list of sentences if there are several."""
    return sentences[0] if len(sentences) == 1 else "\n  - ".join([f"{len(sentences)} mistakes:", *sentences])


def list_known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a section and its sub-sections; a choice of sections gives the keys of all."""
    for name, field in model.model_fields.items():
        yield (key := f"{prefix}.{name}" if prefix else name)
        for kind in _Annotation.of(field).members():
            if kind.section is not None:
                yield from list_known_keys(kind.section, key)


@dataclass(frozen=True)
class _Annotation:
    """A type annotation without its Annotated layers, with their notes (bounds, patterns, tags)."""

    annotation: Any
    notes: tuple[Any, ...] = ()
    field: FieldInfo | None = None

    @classmethod
    def of(cls, field: FieldInfo) -> _Annotation:
        return cls(field.annotation, tuple(field.metadata), field).bare()

    def bare(self) -> _Annotation:
        """Return the annotation without its Annotated layers; their notes are kept."""
        if get_origin(self.annotation) is not Annotated:
            return self
        inner, *notes = get_args(self.annotation)
        return _Annotation(inner, (*self.notes, *_flatten_notes(notes)), self.field).bare()

    def members(self) -> list[_Annotation]:
        """Return the members of a union, or the annotation itself if it is not a union."""
        if get_origin(self.annotation) not in (Union, UnionType):
            return [self]
        return [m for a in get_args(self.annotation) for m in _Annotation(a, (), self.field).bare().members()]

    @property
    def section(self) -> type[BaseModel] | None:
        kind = self.annotation
        return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

    @property
    def tag(self) -> str | None:
        return next((note.tag for note in self.notes if isinstance(note, Tag)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that the annotation's Literals allow."""
        literals = (get_args(m.annotation) for m in self.members() if get_origin(m.annotation) is Literal)
        return tuple(str(word) for words in literals for word in words)

    def has_label(self, label: str) -> bool:
        """Return whether pydantic labels this member of a union so in an error's location."""
        name = getattr(self.section or get_origin(self.annotation), "__name__", "")
        return label == (self.tag or name) or (self.section is None and bool(name) and label.startswith(f"{name}["))

    def inside(self, step: str) -> _Annotation:
        """Return the annotation of the value under a key of a section, or of the entries of a list or mapping."""
        if self.section is not None and step in self.section.model_fields:
            return _Annotation.of(self.section.model_fields[step])
        inner = [a for a in get_args(self.annotation) if a is not Ellipsis]
        return _Annotation(inner[-1]).bare() if inner else _Annotation(object)

    def described(self) -> str:
        """Return a description of the wanted value: "a whole number above 0"."""
        tags = [m.tag for m in self.members() if m.tag]
        if tags:
            return f"a section {{name: ..., ...}} whose name is {join_with_or(tags)}"
        if len(members := self.members()) == 1 and members[0].section is not None:
            keys = list(members[0].section.model_fields)
            return f"a section with the key{'s' * (len(keys) > 1)} {', '.join(keys)}"
        return join_with_or([word for m in members for word in m._words()])

    def _words(self) -> list[str]:
        kind, origin = self.annotation, get_origin(self.annotation)
        if origin is Literal:
            return [str(word) for word in get_args(kind)]
        if self.section is not None:
            return [f"{{{', '.join(f'{key}: ...' for key in self.section.model_fields)}}}"]
        if origin is tuple:
            inner = get_args(kind)
            each = _Annotation(inner[0]).bare().described()
            if inner[-1] is not Ellipsis:
                return [f"a list of {len(inner)} values, each {each}"]
            return [f"a list with at least one entry, each {each}" if self._bound(MinLen) else f"a list, each {each}"]
        if kind is str and any(getattr(note, "pattern", None) for note in self.notes):
            return [_first_sentence(self.field)]
        if kind is bool:
            return ["true", "false"]
        return [_TYPE_WORDS.get(origin or kind, "another value") + self._range()]

    def _range(self) -> str:
        bounds = [f"{words} {n:,}" for words, mark in _BOUND_WORDS if (n := self._bound(mark)) is not None]
        return f" {' and '.join(bounds)}" if bounds else ""

    def _bound(self, mark: type) -> float | None:
        names = {Gt: "gt", Ge: "ge", Lt: "lt", Le: "le", MinLen: "min_length"}
        return next((getattr(note, names[mark]) for note in self.notes if isinstance(note, mark)), None)


_TYPE_WORDS = {int: "a whole number", float: "a number", str: "text", dict: "a section", NoneType: "null"}

_BOUND_WORDS = (("above", Gt), ("of at least", Ge), ("below", Lt), ("of at most", Le))


def _flatten_notes(notes: Sequence[Any]) -> Iterator[Any]:
    """Yield the notes of an annotation; those inside Field(...) are in a list of the Field."""
    for note in notes:
        yield from note.metadata if isinstance(note, FieldInfo) else (note,)


def _first_sentence(field: FieldInfo | None) -> str:
    return re.split(r"\.\s", f"{field.description} " if field else "text ")[0]


@dataclass(frozen=True)
class _Mistake:
    """An error of pydantic, located in the config."""

    error: Any
    key: tuple[str, ...]
    kind: _Annotation
    """Annotation of the value under the key."""

    owner: _Annotation
    """Section that contains the key."""

    rivals: Sequence[_Annotation]
    """Sections that are allowed in the owner's place."""


def _describe(error: ValidationError, model: type[BaseModel], prefix: str, where: KeyOrigins) -> list[str]:
    mistakes = _deepest_mistakes([_locate_mistake(e, model) for e in error.errors(include_url=False)])
    return list(dict.fromkeys(_describe_mistake(m, model, prefix, where) for m in mistakes))


def _locate_mistake(error: Any, model: type[BaseModel]) -> _Mistake:
    """Return an error with its key: pydantic's location without the labels of union members."""
    key: list[str] = []
    kind = at = owner = _Annotation(model)
    rivals: list[_Annotation] = []
    for step in map(str, error["loc"]):
        members = [m for m in at.members() if m.annotation is not NoneType]
        if len(members) > 1:
            at, rivals = next((m for m in members if m.has_label(step)), at), members
            continue
        owner = members[0]
        key.append(step)
        kind = at = owner.inside(step)
    if error["type"] == "missing" and owner.section is None:  # an entry of a list of fixed length
        return _Mistake({**error, "type": "length"}, tuple(key[:-1]), owner, owner, rivals)
    return _Mistake(error, tuple(key), kind, owner, rivals)


def _deepest_mistakes(mistakes: list[_Mistake]) -> list[_Mistake]:
    """Return the errors without a deeper one below: each member of a union gives errors, and the deepest say most."""
    keys = {m.key for m in mistakes}
    return [m for m in mistakes if not any(len(k) > len(m.key) and k[: len(m.key)] == m.key for k in keys)]


def _describe_mistake(m: _Mistake, model: type[BaseModel], prefix: str, where: KeyOrigins) -> str:
    kind, value = m.error["type"], m.error["input"]
    key = ".".join((prefix, *m.key) if prefix else m.key)
    place = _origin_text(key, where)
    if kind == "extra_forbidden":
        return f"{key}{place}: there is no such key{_suggest_key(m, model, prefix)}"
    if kind == "missing":
        return f"{key}{place} is missing; wanted {m.kind.described()}"
    if kind == "value_error":
        return f"{key}{place}: {m.error['ctx']['error']}" if key else str(m.error["ctx"]["error"])
    if kind == "union_tag_invalid":
        tags = [x.tag for x in m.kind.members() if x.tag]
        name = value["name"]
        return (
            f"{key}.name{_origin_text(f'{key}.name', where)}: wanted {join_with_or(tags)}, "
            f"got {show_value(name)}{_suggest_word(f'{key}.name', str(name), tags)}"
        )
    return f"{key}{place}: wanted {m.kind.described()}, got {show_value(value)}{_suggest_value(key, m.kind, value)}"


def _origin_text(key: str, where: KeyOrigins) -> str:
    """Return the origin of a key, or of the nearest section above it, as " (line 12)"; "" if there is none."""
    while key:
        if key in where:
            return f" ({where[key]})"
        key = key.rpartition(".")[0]
    return ""


def _suggest_key(m: _Mistake, model: type[BaseModel], prefix: str) -> str:
    """Return a suggestion for an unknown key: a similar one, its section, or the keys that are known."""
    word, path = m.key[-1], list(list_known_keys(model, prefix))
    assert m.owner.section is not None
    if advice := advise_on_key(word):
        return f"; {advice}"
    if word in path and "." in word:
        steps = word.split(".")
        return f"; in a file keys are nested: {': {'.join(steps)}: ...{'}' * (len(steps) - 1)}"
    if question := did_you_mean(word, m.owner.section.model_fields):
        return question
    if rivals := [r.tag for r in m.rivals if r.tag and r.section and word in r.section.model_fields]:
        return f"; it is a key of {join_with_and(rivals)}, and this is {m.owner.tag}"
    if other := next((k for k in path if k.rpartition(".")[2] == word), None):
        return f"; did you mean {other!r}?"
    file = "a config" if model is Config else "such a file"
    above = m.owner.tag or ".".join((prefix, *m.key[:-1]) if prefix else m.key[:-1]) or file
    return f"; {above} has {', '.join(m.owner.section.model_fields) or 'none'}"


def _suggest_value(key: str, kind: _Annotation, value: object) -> str:
    if not isinstance(value, str):
        return f"; {advice}" if (advice := advise_on_value(key, value)) else ""
    if value in (tags := [m.tag for m in kind.members() if m.tag]):
        return f"; write {{name: {value}}}"
    return _suggest_word(key, value, [*kind.choices, *tags])


def _suggest_word(key: str, word: str, known: Sequence[str]) -> str:
    """Return what another library's word means here, or else the known word that is most like it."""
    return f"; {advice}" if (advice := advise_on_value(key, word)) else did_you_mean(word, known)
