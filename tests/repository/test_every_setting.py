"""Every key of the schema, from every source, in every strategy: obeyed by the run and shown by explain, or refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.every_setting import (
    BASE,
    SETTINGS,
    SOURCES,
    STRATEGIES,
    VARIABLES,
    Probe,
    Setting,
    nested,
    of_strategy,
    outcomes,
    play,
)
from unipar.backend import registry
from unipar.backend.checks import check_strategy, given_source
from unipar.backend.offered_strategies import strategy_of
from unipar.cli.commands.config.explain import explain_config
from unipar.config import Config
from unipar.config.validation_errors import list_known_keys
from unipar.errors import UniparError

ROOT = Path(__file__).parents[2]
KEYS = list(SETTINGS)
PLAYED = [key for key, setting in SETTINGS.items() if setting.shows not in ("", "library")]
TOLD = [key for key, setting in SETTINGS.items() if setting.shows == "library"]


def leaf_keys() -> list[str]:
    """Return each key of the schema that is no section, with the options of every backend."""
    keys = dict.fromkeys(list_known_keys(Config))
    for name in registry.backend_names():
        if registry.find_backend(name).name in ("accelerate", "deepspeed", "horovod", "native"):
            keys |= dict.fromkeys(f"options.{name}.{key}" for key in registry.find_backend(name).options.model_fields)
    both = (
        "train.clip",
        "model.weights",
        "model.compile",
        "model.recompute",
        "train.parts",
        "task.args",
    )  # a value, or a section
    return [key for key in keys if key in both or not any(other.startswith(f"{key}.") for other in keys)]


def covering(key: str) -> list[str]:
    """Return the strategies that `make test` tries a key in: the plain one, and another, which go round among keys."""
    return ["native/nothing", STRATEGIES[KEYS.index(key) % len(STRATEGIES)]]


def test_every_key_has_an_entry() -> None:
    """A new key, or a new option of a backend, needs a value here, and a way to show that it is obeyed."""
    assert sorted(leaf_keys()) == sorted(SETTINGS)
    assert [key for key, setting in SETTINGS.items() if not setting.shows and not setting.test] == []


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_is_obeyed_or_refused(tmp_path: Path, key: str) -> None:
    """From each source: the config of the run has the value, or a sentence names the key or one that it needs."""
    named = (key, *SETTINGS[key].beside, key.rpartition(".")[0], "parallel.data")
    for source, strategy, outcome in outcomes(key, tmp_path, covering(key)):
        if outcome not in ("obeyed", "another backend's"):
            assert any(name in outcome for name in named), f"{source}, {strategy}: {outcome}"
            assert not outcome.startswith("lost"), f"{source}, {strategy}: {outcome}"


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_settings_in_a_strategy(tmp_path: Path, strategy: str) -> None:
    """The same for all keys."""
    lost = [
        (key, source)
        for key in KEYS
        for source, _, outcome in outcomes(key, tmp_path, [strategy])
        if outcome.startswith("lost")
    ]
    assert lost == []


@pytest.mark.parametrize("key", KEYS)
def test_explain_shows_where_a_setting_comes_from(tmp_path: Path, key: str) -> None:
    """The value and its source, which go round among keys."""
    setting, (source, read) = SETTINGS[key], [*SOURCES.items()][KEYS.index(key) % len(SOURCES)]
    values = {k: v for k, v in {**BASE, **setting.beside}.items() if k not in setting.without}
    values |= {"backend": setting.strategy.partition("/")[0]} if key != "backend" else {}
    rows = {row.key: row for row in explain_config(read(values, key, setting.value, tmp_path)).values}
    wanted = {"file": "line 1", "--set": "--set", "overrides": "overrides", "script": "given"}
    shown = [row.origin for name, row in rows.items() if name == key or name.startswith(f"{key}.")]
    assert any(origin.startswith(wanted.get(source, "kept from the run before")) for origin in shown)


def _values(setting: Setting, more: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys of a run, with files in place of their names."""
    files = {"WEIGHTS": "weights.safetensors", "PARTIAL": "partial.safetensors", "ELSEWHERE": "elsewhere"}
    names = {name: str(folder / file) for name, file in files.items()}
    values = {**BASE}
    if more or not setting.alone:
        values = {k: v for k, v in BASE.items() if k not in setting.without} | {**setting.beside, **more}
    return {key: names.get(v, v) if isinstance(v, str) else v for key, v in values.items()}


@pytest.mark.parametrize("key", PLAYED)
def test_a_run_does_what_a_setting_says(tmp_path: Path, key: str) -> None:
    """The fact that a key is about differs from that of the run without it."""
    setting = SETTINGS[key]
    weights = {name: torch.full_like(t, 0.1) for name, t in Probe().model().state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    save_file({"head.bias": weights["head.bias"]}, tmp_path / "partial.safetensors")
    before = play(_values(setting, {}, tmp_path), tmp_path / "before")
    after = play(_values(setting, {key: setting.value}, tmp_path), tmp_path / "after")
    assert after.get("error") == before.get("error") or setting.shows == "error"
    assert after.get(setting.shows) != before.get(setting.shows)


@pytest.mark.parametrize("key", TOLD)
def test_a_library_is_told_what_a_setting_says(key: str) -> None:
    """The settings that the backend gives its library differ from those without the key."""
    setting, told = SETTINGS[key], list[Any]()
    for more in ({}, {key: setting.value}):
        source = given_source(nested({**BASE, **setting.beside, **more, "backend": setting.strategy.partition("/")[0]}))
        told.append(source.backend.native_config(source.config, 100_000))
    assert told[0] != told[1]


@pytest.mark.parametrize("key", VARIABLES)
def test_a_launchers_variable_is_refused_in_every_strategy(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate launch was told what the config does not say: whichever backend trains, a sentence says so."""
    configs = {s: given_source(nested({**BASE, **of_strategy(s)})) for s in STRATEGIES}
    for name, value in VARIABLES[key].items():
        monkeypatch.setenv(name, value)
    for strategy, source in configs.items():
        with pytest.raises(UniparError) as refused:
            check_strategy(source.config, source.backend, source.strategy)
        assert re.search("accelerate launch was told|Accelerate's variables here say", str(refused.value)), strategy


def test_tests_that_entries_name_exist() -> None:
    """An entry names the test that shows an effect which a run of one process cannot."""
    missing: list[str] = []
    for key, setting in SETTINGS.items():
        file, _, name = setting.test.partition("::")
        if not file:
            continue
        tree = ast.parse((ROOT / file).read_text("utf-8")) if (ROOT / file).is_file() else None
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} if tree else set[str]()
        if tree is None or (name and name not in names):
            missing.append(f"{key}: {setting.test}")
    assert missing == []


def test_strategies_are_complete() -> None:
    """Each strategy that is tried is one that its keys select."""
    chosen = [str(strategy_of(given_source(nested({**BASE, **of_strategy(s)})).config)) for s in STRATEGIES]
    assert chosen == list(STRATEGIES)
