"""Safe YAML: what a file may hold, and the line of what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unipar.config import safe_yaml
from unipar.config.config_source import load_config_file, load_given_config
from unipar.errors import ConfigError

GOOD = "batch: {total: 8}\ntrain: {steps: 1}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to be written, named as in a shell that stands beside it."""
    monkeypatch.chdir(tmp_path)
    return Path("x.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("1e5", 100000.0),
        (".5", 0.5),
        ("-7", -7),
        ("true", True),
        ("~", None),
        ("null", None),
        ("yes", "yes"),
        ("on", "on"),
        ("True", "True"),
        ("010", "010"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("'3'", "3"),
        ('"true"', "true"),
    ],
)
def test_plain_values(text: str, value: object) -> None:
    """YAML 1.2 without its guesses: what is not clearly a number, true, false or null is text."""
    tree, _ = safe_yaml.parse_yaml(f"a: [{text}]")
    assert tree == {"a": [value]}
    assert type(tree["a"][0]) is type(value)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "batch: {total: 8}\nbatch: {total: 9}\n",
            "line 2: the key 'batch' is given twice, first in line 1; remove one",
        ),
        ("batch:\n  total: 8\n  total: 9\n", "line 3: the key 'total' is given twice, first in line 2; remove one"),
        (BOMB, "line 5: more than 10,000 values with aliases expanded; a config is smaller than that"),
        ("- x\n" * 20_000, "line 10000: more than 10,000 values with aliases expanded; a config is smaller than that"),
        ("a: 1\nb: &b [*b]\n", "line 2: an alias that contains itself"),
        ("a: 1\nb: *b\n", "line 2: found undefined alias 'b'"),
        ("a:\n" + "[" * 40, "line 2: nested more than 32 levels deep"),
        (
            "a: 1\nb: !!python/object/apply:os.system [ls]\n",
            "line 2: the tag !!python/object/apply:os.system is refused: a config holds plain values only",
        ),
        ("a: !!str 3\n", "line 1: the tag !!str is refused: a config holds plain values only"),
        ("a: !mine 3\n", "line 1: the tag !mine is refused: a config holds plain values only"),
        ("a: 1\n---\nb: 2\n", "line 2: a second document begins here; a config has only one"),
        ("a:\n\tb: 1\n", "line 2: a tab cannot indent; use spaces"),
        ("a: b: c\n", "line 1: mapping values are not allowed here"),
        ("a: 1\n7: x\n", "line 2: a key must be text, got 7; put it in quotes if it is text"),
        ("a: 1\n[b]: x\n", "line 2: a key must be text, got a list or a mapping; put it in quotes if it is text"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "line 3: merge keys (<<) are not supported; write the keys out"),
        ("a: 1\nb: .inf\n", "line 2: the number .inf is not finite"),
        ("a: 1e999\n", "line 1: the number 1e999 is not finite"),
        ("a: 9223372036854775808\n", "line 1: the number 9223372036854775808 does not fit into 64 bits"),
        (f"a: {'9' * 5000}\n", f"line 1: the number {'9' * 24}... does not fit into 64 bits"),
        ("a: 1\nb: \x00\n", "line 2: the character U+0000 is not allowed in YAML"),
        (b"a: 1\nb: \xff\n", "line 2: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("", "line 1: a config consists of keys and values, such as `batch: {total: 32}`; this is empty"),
        (
            "- a\n",
            "line 1: a config consists of keys and values, such as `batch: {total: 32}`; this is a list, not a mapping",
        ),
        (
            "hello\n",
            "line 1: a config consists of keys and values, such as `batch: {total: 32}`; "
            "this is 'hello', not a mapping",
        ),
        ("x\n" * (1 << 19) + "x", "line 524289: the file is larger than 1 MiB, so it is not a config"),
    ],
)
def test_what_yaml_may_not_hold(here: Path, text: str | bytes, sentence: str) -> None:
    """Each is one sentence with file and line, and none takes long or builds anything."""
    here.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as e:
        load_config_file(here)
    assert str(e.value) == f"x.yaml, {sentence}"


def test_a_file_of_one_mebibyte_is_read(here: Path) -> None:
    """The limit itself is allowed."""
    padded = GOOD + "#" * ((1 << 20) - len(GOOD))
    here.write_text(padded, encoding="utf-8")
    assert load_config_file(here).config.batch.total == 8


def test_an_alias_within_reason_is_read(here: Path) -> None:
    """Anchors are not refused, only their growth is."""
    here.write_text("train: {steps: &n 3, schedule: {name: cosine, warmup: *n}}\nbatch: {total: 8}\n", encoding="utf-8")
    assert load_config_file(here).config.train.schedule.warmup == 3


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("y.yaml", "there is no file y.yaml"),
        ("quikstart.yaml", "there is no file quikstart.yaml; did you mean quickstart.yaml?"),
        ("nowhere/x.yaml", "there is no file nowhere/x.yaml: there is no folder nowhere"),
        ("folder", "folder is a folder; name a config file in it"),
        ("train.py", "train.py is a Python file, not a config: start it with `python train.py`"),
        ("/dev/null", "/dev/null is not a plain file"),
    ],
)
def test_files_that_are_no_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, sentence: str) -> None:
    """A path that names no config says so, with the file that was probably meant."""
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text(GOOD, encoding="utf-8")
    Path("folder").mkdir()
    Path("train.py").touch()
    with pytest.raises(ConfigError) as e:
        load_given_config(path)
    assert str(e.value) == sentence


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's reason is the sentence."""

    def closed(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(GOOD, encoding="utf-8")
    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(ConfigError) as e:
        load_given_config("x.yaml")
    assert str(e.value) == "x.yaml cannot be read: Permission denied"
