"""Words of other libraries: each is given to a command, and each answer names keys and strategies that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from unipar.backend.offered_strategies import read_strategy, require_strategy
from unipar.backend.registry import backend_names, find_backend
from unipar.config import Config
from unipar.config.config_source import parse_set_argument
from unipar.config.foreign_words import FOREIGN_KEYS, FOREIGN_STRATEGIES, FOREIGN_VALUES
from unipar.config.validation_errors import list_known_keys

CONFIG = """\
task: {use: net.py:Net}
device: cpu
batch: {total: 8}
train: {steps: 2}
"""
KEYS = [(word, answer) for table in FOREIGN_KEYS.values() for words, answer in table.items() for word in words.split()]
VALUES = [
    (key, word, answer)
    for key, table in FOREIGN_VALUES.items()
    for words, answer in table.items()
    for word in words.split()
]
STRATEGIES = [(word, answer) for words, answer in FOREIGN_STRATEGIES.items() for word in words.split()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def keys_named(answer: str) -> list[str]:
    """Return the dotted keys in an answer."""
    return re.findall(r"(?<![\w.-])(?:[a-z_]+\.)+[a-z_]+(?![\w(]|\.[a-z])", answer)


def test_each_key_is_answered(unipar: Any, folder: Path) -> None:
    """A config with all of them at its top: each is a mistake with its own answer."""
    (folder / "x.yaml").write_text(CONFIG + "".join(f"{word}: 1\n" for word in dict(KEYS)), encoding="utf-8")
    answer = unipar("check", "x.yaml")
    assert answer.code == 2
    for number, (word, said) in enumerate(dict(KEYS).items(), CONFIG.count("\n") + 1):
        assert f"\n  - {word} (line {number}): there is no such key; {said}\n" in answer.err


def test_a_word_has_one_answer() -> None:
    """Libraries that share a word mean the same by it; there are more than 120 words."""
    answers: dict[str, set[str]] = {}
    for word, answer in KEYS:
        answers.setdefault(word, set()).add(answer)
    assert {word: said for word, said in answers.items() if len(said) > 1} == {}
    assert len(answers) > 120


def test_answers_name_keys_that_exist() -> None:
    """Of the config, or of a backend's options."""
    known = set(list_known_keys(Config))
    known |= {
        f"options.{name}.{key}" for name in backend_names() for key in list_known_keys(find_backend(name).options)
    }
    named = {key for *_, answer in [*KEYS, *VALUES, *STRATEGIES] for key in keys_named(answer)}
    own = {key for key in named if key.partition(".")[0] in Config.model_fields}
    assert own - known == set()
    assert named - own <= {"file.py", "file.safetensors", "torch.autograd.set_detect_anomaly"}
    assert len(own) > 40


@pytest.mark.parametrize(("key", "word", "said"), VALUES)
def test_each_value_is_answered(unipar: Any, key: str, word: str, said: str) -> None:
    """The sentence ends with what to write."""
    answer = unipar("check", "x.yaml", "--set", f"{key}={word}")
    assert answer.code == (3 if key == "backend" else 2)
    assert answer.err.endswith(f"; {said}\n")


@pytest.mark.parametrize(("word", "said"), STRATEGIES)
def test_each_strategy_is_answered(unipar: Any, word: str, said: str) -> None:
    """With --backend; the name in the answer is a strategy that is offered."""
    answer = unipar("check", "x.yaml", "--backend", word)
    assert answer.err.startswith(f"unipar: no backend {word!r}; {said}; known: ")
    name = said.split()[1].rstrip(",")
    if name != "one":
        assert require_strategy(read_strategy(name))


def test_a_flag_is_answered_with_its_key(unipar: Any) -> None:
    """With dashes or underscores; a typing error of a flag of unipar still gets the flag."""
    said = "; the learning rate is train.optimizer.lr; --set KEY=VALUE changes a key\n"
    assert unipar("run", "x.yaml", "--learning-rate", "3").err.endswith(f"No such option: --learning-rate{said}")
    assert unipar("run", "x.yaml", "--learning_rate=3").err.endswith(f"No such option: --learning_rate{said}")
    assert unipar("run", "x.yaml", "--overwrit").err.endswith(
        "No such option: --overwrit (Possible options: --overwrite)\n"
    )


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}', "DeepSpeed"),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "Accelerate"),
        ("base_model: gpt2\nmicro_batch_size: 2\nnum_epochs: 1\n", "a Trainer"),
    ],
)
def test_another_librarys_file_is_to_be_imported(unipar: Any, folder: Path, text: str, library: str) -> None:
    """Given to `run`; the line can be pasted."""
    (folder / "their file.yaml").write_text(text, encoding="utf-8")
    assert unipar("run", "their file.yaml").err == (
        f"unipar: their file.yaml is a config of {library}: "
        "`unipar import 'their file.yaml' -o train.yaml` makes one of unipar\n"
    )


def test_sets_are_read_as_yaml() -> None:
    """So that `true` arrives as a value that is no text."""
    assert parse_set_argument("model.recompute=true") == ("model.recompute", True)
