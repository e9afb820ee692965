"""Reading configs: what YAML may hold, where each key came from, and which of two givers wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unipar.backend.checks import given_source, in_strategy, read_source
from unipar.config import Config
from unipar.config.config import Data
from unipar.config.config_source import ConfigSource
from unipar.config.sections.batch import Batch
from unipar.config.sections.optimizer import SGD
from unipar.config.sections.train import Train
from unipar.errors import BackendNotFound, ConfigError

GOOD = """\
task: {use: ../code/net.py:Net, args: {layers: 2}}
batch:
  total: 32
  micro: 4
train:
  steps: 10
  optimizer: {name: adamw, lr: 3e-4, betas: [0.9, 0.95]}
  clip: 1.0
data: {shuffle: false}
options: {deepspeed: {buckets: library}}
"""

Reader = Callable[..., ConfigSource]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Writes x.yaml in a folder of its own and reads it there."""
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path / "configs")

    def reader(text: str | bytes = GOOD, *sets: str, **overrides: Any) -> ConfigSource:
        file = Path("x.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_source(file, sets, overrides)

    return reader


def refusal(config: Reader, text: str | bytes, *sets: str) -> str:
    with pytest.raises(ConfigError) as e:
        config(text, *sets)
    return str(e.value)


def test_every_key_has_its_line(config: Reader) -> None:
    """Sections, keys in them and keys on one line all know where they stand; defaults do not."""
    origins = config().origins
    assert origins["task"] == origins["task.use"] == origins["task.args.layers"] == "line 1"
    assert origins["batch"] == "line 2"
    assert origins["batch.micro"] == "line 4"
    assert origins["train.optimizer.betas"] == "line 7"
    assert origins["options.deepspeed.buckets"] == "line 10"
    assert "train.seed" not in origins


def test_name_and_folders(config: Reader, tmp_path: Path) -> None:
    """The run is named after the file, and the task's file is found beside the config, not beside the shell."""
    source = config()
    assert source.name == "x"
    assert source.out == Path("runs/x")
    assert source.folder == tmp_path / "configs"
    assert source.config.task is not None
    assert source.config.task.use == f"{tmp_path}/code/net.py:Net"


def test_a_module_stays_a_module(config: Reader) -> None:
    """Only files are made absolute."""
    source = config(GOOD, "task.use=package.net:Net")
    assert source.config.task is not None
    assert source.config.task.use == "package.net:Net"


def test_a_file_given_on_the_command_line_is_relative_to_the_shell(config: Reader, tmp_path: Path) -> None:
    """What the shell completes is what is found."""
    source = config(GOOD, "task.use=net.py:Net")
    assert source.config.task is not None
    assert source.config.task.use == f"{tmp_path}/configs/net.py:Net"


def test_set_wins_over_the_file_and_later_over_earlier(config: Reader) -> None:
    """One order: file, each --set from left to right, overrides of a script."""
    source = config(GOOD, "train.seed=1", "train.seed=2", "batch.total=64", train={"seed": 3})
    assert source.config.train.seed == 3
    assert source.config.batch.total == 64
    assert source.origins["train.seed"] == "overrides"
    assert source.origins["batch.total"] == "--set"
    assert source.origins["batch.micro"] == "line 4"


def test_a_section_changes_only_what_it_names(config: Reader) -> None:
    """A nested mapping is the same as its dotted keys."""
    nested = config(GOOD, train={"optimizer": {"lr": 1.0}})
    dotted = config(GOOD, **{"train.optimizer.lr": 1.0})
    assert nested.config == dotted.config
    assert nested.origins == dotted.origins
    assert nested.config.train.optimizer.betas == (0.9, 0.95)  # type: ignore[union-attr]
    assert nested.config.train.steps == 10


def test_another_name_begins_a_section_anew(config: Reader) -> None:
    """Another optimizer inherits nothing from the one in the file, so its betas are in nobody's way."""
    optimizer = config(GOOD, "train.optimizer={name: sgd, lr: 0.1}").config.train.optimizer
    assert optimizer == SGD(lr=0.1)


@pytest.mark.parametrize("way", ["sets", "overrides", "nested"])
def test_a_length_replaces_the_files_other_one(config: Reader, way: str) -> None:
    """Steps in the file and epochs on the command line: the command line means epochs."""
    match way:
        case "sets":
            source = config(GOOD, "train.epochs=2")
        case "overrides":
            source = config(GOOD, **{"train.epochs": 2})
        case _:
            source = config(GOOD, train={"epochs": 2})
    assert (source.config.train.steps, source.config.train.epochs) == (None, 2)
    assert source.origins["train.steps"] == f"{'--set' if way == 'sets' else 'overrides'} train.epochs"


def test_two_lengths_given_together_are_an_error(config: Reader) -> None:
    """Only what the file said gives way."""
    assert refusal(config, GOOD, "train.epochs=2", "train.steps=3") == (
        "x.yaml: train (line 5): give one of steps and epochs, not both"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("steps", "--set steps: write key=value, as in --set train.steps=100"),
        ("=3", "--set =3: write key=value, as in --set train.steps=100"),
        ("train..steps=3", "--set train..steps=3: write key=value, as in --set train.steps=100"),
        (
            "train.seed=!!int 3",
            "--set train.seed=!!int 3: the tag !!int is refused: a config holds plain values only",
        ),
        ("trian.steps=3", "x.yaml: trian (--set): there is no such key; did you mean 'train'?"),
        ("train.stesp=3", "x.yaml: train.stesp (--set): there is no such key; did you mean 'steps'?"),
        (
            "train.seed=abc",
            "x.yaml: train.seed (--set): wanted a whole number of at least 0 and below 4,294,967,296, got 'abc'",
        ),
        (
            "train.clip.norm=fp64",
            "--set train.clip.norm: train.clip is 1.0 (line 8), not a section; "
            "give train.clip in full: {norm: ..., ...}",
        ),
        (
            "task.args={}",
            "--set task.args: {} changes nothing; name a key, or leave it out",
        ),
        (
            "options.deepspeed.buckets=scald",
            "x.yaml: options.deepspeed.buckets (--set): wanted scaled or library, got 'scald'; did you mean 'scaled'?",
        ),
        (
            "backend=native/parameters",
            "x.yaml: backend (--set): 'native/parameters' is a strategy; "
            "write backend: native and parallel: {shard: parameters}",
        ),
        (
            "parallel.sequence=true",
            "x.yaml: parallel (--set): sequence splits activations over the ranks of tensor, and tensor is 1: give "
            "tensor, or leave it out",
        ),
        (
            "parallel.schedule=gpipe",
            "x.yaml: parallel (--set): gpipe is a schedule of pipelines, and pipeline is 1: give pipeline, or leave it "
            "out",
        ),
    ],
)
def test_changes_that_are_refused(config: Reader, change: str, sentence: str) -> None:
    """A bad --set names what was typed; a good one with a bad value is an error like the file's."""
    assert refusal(config, GOOD, change) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "backend: natve\n",
            "x.yaml: backend (line 11): no backend 'natve'; did you mean 'native'? known: ",
        ),
        (
            "compare: {strategies: [x]}\noptions2: 3\n",
            "x.yaml: options2 (line 12): there is no such key; did you mean 'options'?",
        ),
        (
            "model:\n  recompute: block\n",
            "x.yaml: model.recompute (line 12): wanted none, blocks, selective, a list, each text or {fit: ...}, got "
            "'block'; did you mean 'blocks'?",
        ),
    ],
)
def test_the_line_is_named(config: Reader, text: str, sentence: str) -> None:
    """Errors about a file's keys say in which line they stand."""
    with pytest.raises((ConfigError, BackendNotFound)) as e:
        config(GOOD + text)
    assert str(e.value).startswith(sentence)


def test_an_unknown_backends_options(config: Reader) -> None:
    """Options of a backend that nobody offers are a typo, whoever trains."""
    with pytest.raises(BackendNotFound) as e:
        config(GOOD.replace("deepspeed", "deepsped"))
    assert str(e.value).startswith(
        "x.yaml: options.deepsped (line 10): no backend 'deepsped'; did you mean 'deepspeed'?"
    )


def test_all_mistakes_at_once(config: Reader) -> None:
    """Keys, values, the backend's name, its options and a tracker: one run of the command shows all of them."""
    wrong = GOOD.replace("deepspeed", "deepsped") + (
        "backend: natve\nlog: {to: [wandbb]}\nmodell: {}\neval: {every: often}\n"
    )
    with pytest.raises(ConfigError) as e:
        config(wrong)
    first, *rest = str(e.value).split("\n  - ")
    assert first == "x.yaml: 5 mistakes:"
    assert [line.partition(";")[0] for line in rest] == [
        "eval.every (line 14): wanted a whole number above 0 or null, got 'often'",
        "modell (line 13): there is no such key",
        "backend (line 11): no backend 'natve'",
        "log.to (line 12): no tracker 'wandbb'",
        "options.deepsped (line 10): no backend 'deepsped'",
    ]


def test_all_names_at_once() -> None:
    """The same where every key is right; one alone keeps its own type, a backend that is not there."""
    made = {"batch": {"total": 8}, "train": {"steps": 1}, "backend": "natve", "options": {"horovod": {"fusion": 3}}}
    with pytest.raises(ConfigError) as e:
        given_source(made)
    assert not isinstance(e.value, BackendNotFound)
    first, backend, option = str(e.value).split("\n  - ")
    assert first == "the config: 2 mistakes:"
    assert backend.startswith("backend: no backend 'natve'; did you mean 'native'?")
    assert option == "options.horovod.fusion: there is no such key; did you mean 'fusion_mb'?"
    with pytest.raises(BackendNotFound):
        given_source({**made, "options": {}})


@pytest.mark.parametrize("to", ["wandb", 3, [3], None])
@pytest.mark.parametrize("options", [3, {"native": 3}, ["native"]])
@pytest.mark.parametrize("backend", [3, None, ["native"]])
def test_names_of_a_wrong_kind(to: object, options: object, backend: object) -> None:
    """What is no text is no name either: the sentence on its kind is enough."""
    made = {"batch": {"total": 8}, "train": {"steps": 1}, "backend": backend, "log": {"to": to}, "options": options}
    with pytest.raises(ConfigError) as e:
        given_source(made)
    assert "backend: wanted text, got " in str(e.value)
    assert "no backend" not in str(e.value)


def test_a_mapping_is_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own dict: named run, its files relative to the working directory, tuples and paths made plain."""
    monkeypatch.chdir(tmp_path)
    source = given_source(
        {
            "task": {"use": "net.py:Net", "args": {"sizes": (1, 2)}},
            "batch": {"total": 8},
            "train": {"steps": 1},
            "out": tmp_path / "there",
        },
        {"train.steps": 2},
    )
    assert source.name == "run"
    assert source.out == tmp_path / "there"
    assert source.config.task is not None
    assert source.config.task.use == f"{tmp_path}/net.py:Net"
    assert source.config.task.args == {"sizes": [1, 2]}
    assert source.config.train.steps == 2
    assert source.origins["batch.total"] == "given"
    assert source.origins["train.steps"] == "overrides"


def test_a_config_keeps_its_defaults_as_defaults() -> None:
    """What a script left out of a Config is not taken for said; a section's kind is."""
    made = Config(batch=Batch(total=8), train=Train(steps=1, optimizer=SGD(lr=0.1)), data=Data(workers=2))
    source = given_source(made, {"train.seed": 7})
    assert source.config.train.optimizer == SGD(lr=0.1)
    assert source.config.train.seed == 7
    assert source.config.data.model_fields_set == {"workers"}
    assert source.origins["data.workers"] == "given"
    assert "data.shuffle" not in source.origins


def test_overrides_leave_the_given_config_alone() -> None:
    """A frozen Config is not changed through the dicts that it holds."""
    made = Config(batch=Batch(total=8), train=Train(steps=1), options={"native": {"bucket_cap_mb": 5}})
    given_source(made, {"options.native.bucket_cap_mb": 6})
    assert made.options == {"native": {"bucket_cap_mb": 5}}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(float("nan"), "NaN"), ({1: 2}, '{"1": 2}'), ({1, 2}, "{1, 2}"), (b"x", "b'x'")],
)
def test_what_no_file_could_hold(value: object, shown: str) -> None:
    """Workers read the config as JSON, so a script may say no more than a file."""
    with pytest.raises(ConfigError) as e:
        given_source({"batch": {"total": 8}, "train": {"steps": 1}}, {"task.args.x": value})
    assert str(e.value) == (
        f"overrides task.args.x: {shown} is not a plain value: a config holds text, finite numbers, true, false, "
        "null, lists, and mappings whose keys are text"
    )


def test_a_mapping_that_holds_itself() -> None:
    """Expanding it would never end, so it is refused."""
    loop: dict[str, Any] = {}
    loop["x"] = loop
    with pytest.raises(ConfigError, match=r"nested more than 32 levels deep$"):
        given_source({"batch": {"total": 8}, "train": {"steps": 1}, "task": loop})


def test_written_for_the_ranks() -> None:
    """A rank reads the same config back, and still knows which keys of data nobody said."""
    made = Config(batch=Batch(total=8), train=Train(epochs=2, optimizer=SGD(lr=0.1)), data=Data(workers=2))
    back = Config.model_validate_json(made.json_for_ranks())
    assert back == made
    assert back.data.model_fields_set == {"workers"}


def test_in_another_strategy(config: Reader) -> None:
    """--backend and --out change the config and say that they did."""
    source = in_strategy(config(), "deepspeed/gradients").with_out("there")
    assert (source.config.backend, source.config.parallel.shard) == ("deepspeed", "gradients")
    assert source.config.options == {"deepspeed": {"buckets": "library"}}  # which --backend does not name
    assert source.origins["parallel.shard"] == "--backend"
    assert (source.out, source.origins["out"]) == (Path("there"), "--out")


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[2].glob("configs/*.yaml")), ids=lambda f: f.name)
def test_our_configs(file: Path) -> None:
    """Every config in the repository is one, and names a task that is there."""
    source = read_source(file)
    assert source.config.task is not None
    assert Path(str(source.config.task.use).rpartition(":")[0]).is_file()


def test_a_strategy_whose_axes_do_not_divide_the_ranks(config: Reader) -> None:
    """The config's ranks are kept in another strategy, so the sentence says which number they need."""
    with pytest.raises(ConfigError) as wrong:
        in_strategy(config(GOOD + "parallel: {data: 3}\n"), "native/nothing+tensor2")
    assert str(wrong.value) == (
        "--backend: native/nothing+tensor2 needs a multiple of 2 ranks (tensor 2), and the config has 3: set "
        "parallel.data to 2, or to a multiple of it"
    )


SHORT = GOOD.replace("steps: 10", "steps: 50\n  schedule: {schedule}")


@pytest.mark.parametrize(
    ("schedule", "steps", "said"),
    [
        ("{warmup: 5}", 3, "warmup 5 -> 1"),
        ("{name: wsd, warmup: 10, decay: 20}", 10, "warmup 10 -> 2, decay 20 -> 4"),
        ("{name: wsd, warmup: 10, decay: 20}", 1, "warmup 10 -> 0, decay 20 -> 1"),
        ("{name: wsd, warmup: 0.1, decay: 40}", 4, "decay 40 -> 3"),
        ("{name: step, every: 20}", 10, "every 20 -> 4"),
        ("{name: step, milestones: [10, 40], warmup: 5}", 10, "warmup 5 -> 1, milestones [10, 40] -> [2, 8]"),
        ("{name: step, milestones: [10, 40]}", 1, "step -> constant"),
        ("{name: inverse-root, warmup: 20, scale: 10}", 5, "warmup 20 -> 2, scale 10 -> 1"),
        ("{name: one-cycle}", 3, "pct_start 0.3 -> 0.67"),
        ("{name: one-cycle}", 2, "one-cycle -> constant"),
    ],
)
def test_fewer_steps_shorten_the_schedule(config: Reader, schedule: str, steps: int, said: str) -> None:
    """Its lengths keep their share of the run, and a note says so; a shortened value names its cause as its origin."""
    source = config(SHORT.replace("{schedule}", schedule), f"train.steps={steps}")
    why = f"--set train.steps={steps}"
    assert source.notes == (f"{why} shortens train.schedule, written for 50 steps: {said}",)
    key = "name" if "constant" in said else said.partition(" ")[0]
    assert source.origins[f"train.schedule.{key}"] == f"shortened for {why}"


def test_fewer_steps_lower_intervals(config: Reader) -> None:
    """A smoke test evaluates once, at its end, and says so; an interval of the command line stays."""
    text = GOOD + "eval: {every: 5}\n"
    source = config(text, "train.steps=3")
    assert source.config.eval.every == 3
    assert source.notes == ("--set train.steps=3 lowers eval.every: 5 -> 3",)
    assert source.origins["eval.every"] == "shortened for --set train.steps=3"
    assert config(text, "train.steps=3", "eval.every=4").config.eval.every == 4
    assert config(text).notes == ()


def test_a_schedule_that_fits_is_not_shortened(config: Reader) -> None:
    """Overridden steps change nothing else. Where the file gives epochs, the length it was written for is not known."""
    text = SHORT.replace("{schedule}", "{warmup: 5}")
    source = config(text, "train.steps=5")
    assert (source.notes, source.config.train.schedule.warmup) == ((), 5)
    by_epochs = config(text.replace("steps: 50", "epochs: 2"), "train.steps=3")
    assert by_epochs.notes == ("--set train.steps=3 shortens train.schedule: warmup 5 -> 2",)
    assert config(text, **{"train.steps": 3}).notes[0].startswith("overrides train.steps=3 shortens ")


@pytest.mark.parametrize(
    ("steps", "sets"),
    [
        (3, ()),
        (50, ("train.steps=3", "train.schedule.warmup=5")),
        (50, ("train={steps: 3, schedule: {warmup: 5}}",)),
        (4, ("train.steps=3",)),
    ],
    ids=["in one file", "both by --set", "in one --set", "in a file that was wrong before"],
)
def test_a_schedule_that_was_given_with_the_steps_is_refused(config: Reader, steps: int, sets: tuple[str, ...]) -> None:
    """A schedule that was said together with the steps, or that has never fitted, is not shortened."""
    text = SHORT.replace("{schedule}", "{warmup: 5}").replace("steps: 50", f"steps: {steps}")
    assert "schedule.warmup (5) is more than steps (3)" in refusal(config, text, *sets)


def _read_both(config: Reader, more: str) -> ConfigSource:
    config()
    (folder := Path("more")).mkdir(exist_ok=True)
    (folder / "eight.yaml").write_text(more, "utf-8")
    return read_source(Path("x.yaml"), (), {}, [folder / "eight.yaml"])


def test_a_later_file_changes_keys(config: Reader) -> None:
    """Sections keep the keys that only the first file has, and each value knows its file."""
    source = _read_both(config, "train:\n  clip: 2.0\nbatch: {micro: 8}\n")
    train, batch = source.config.train, source.config.batch
    assert (train.clip, train.steps, batch.micro, batch.total) == (2.0, 10, 8, 32)
    assert source.origins["train.clip"] == "more/eight.yaml, line 2"
    assert source.origins["train.steps"] == "x.yaml, line 6"
    assert (source.label, source.name) == ("x.yaml + more/eight.yaml", "x+eight")


def test_a_later_file_names_another_optimizer(config: Reader) -> None:
    """Keys of the first file's optimizer go, as with `--set`; epochs replace steps."""
    source = _read_both(config, "train: {optimizer: {name: sgd, lr: 0.1}, epochs: 2}\n")
    assert isinstance(source.config.train.optimizer, SGD)
    assert (source.config.train.steps, source.config.train.epochs) == (None, 2)
    assert "train.optimizer.betas" not in source.origins


def test_paths_of_a_later_file(config: Reader, tmp_path: Path) -> None:
    """They are relative to its own folder."""
    task = _read_both(config, "task: {use: net.py:Net}\n").config.task
    assert task is not None
    assert task.use == f"{tmp_path}/configs/more/net.py:Net"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "train: {clipp: 2.0}\n",
            "x.yaml + more/eight.yaml: train.clipp (more/eight.yaml, line 1): there is no such key; did you mean "
            "'clip'?",
        ),
        (
            "train:\n  clip: 1.0\n  clip: 2.0\n",
            "more/eight.yaml, line 3: the key 'clip' is given twice, first in line 2; remove one",
        ),
        ("train: {}\n", "more/eight.yaml train: {} changes nothing; name a key, or leave it out"),
        (
            "- 1\n",
            "more/eight.yaml, line 1: a config consists of keys and values, such as `batch: {total: 32}`; this is a "
            "list, not a mapping",
        ),
    ],
)
def test_mistakes_in_a_later_file(config: Reader, more: str, message: str) -> None:
    """The error names the file and the line."""
    with pytest.raises(ConfigError) as e:
        _read_both(config, more)
    assert str(e.value) == message
