"""The command line: what it prints, what it exits with."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_rows import FAR, ONE, SAME, compared
from tests.support.exports import WORDS
from unipar.errors import ConfigError, Hung, NonFinite, Stopped, WorkerFailed
from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult

CONFIG = """\
task: {use: net.py:Net}
device: cpu
parallel: {data: 2}
batch: {total: 8}
train: {steps: 2}
"""
NET = """\
class Net:
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): ...
"""
COMMANDS = (
    *(
        "run",
        "compare",
        "scale",
        "submit",
        "runs",
        "report",
        "trace",
        "verify",
        "observe",
        "check",
        "init",
        "explain",
        "plan",
        "export",
        "import",
        "schema",
        "backends",
        "doctor",
    ),
    "install",
    "jobs",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG, encoding="utf-8")
    Path("net.py").write_text(NET, encoding="utf-8")
    return tmp_path


def test_help_teaches_by_example(unipar: Any) -> None:
    """Every command shows how it is typed, and what its exit codes mean."""
    whole = unipar("--help")
    assert whole.code == 0
    assert [line.split()[0] for line in whole.out.partition("Commands:\n")[2].splitlines()[: len(COMMANDS)]] == list(
        COMMANDS
    )
    for command in COMMANDS:
        said = unipar(command, "--help").out
        assert said.count(f"unipar {command}") >= 2, command
        assert "130 stopped by a signal" in said


@pytest.mark.parametrize("option", ["-o", "--out"])
def test_export_takes_o_as_import_does(unipar: Any, folder: Path, option: str) -> None:
    """Both names of the option are the folder that is written; without it the folder is named after the config."""
    Path("words.yaml").write_text(json.dumps(WORDS), encoding="utf-8")
    answer = unipar("export", "words.yaml", "--to", "torchrun", option, "made")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[0] == "folder    made"
    assert (folder / "made" / "run.sh").is_file()
    assert not (folder / "words-torchrun").exists()


def test_version(unipar: Any) -> None:
    """The command prints the version of the distribution."""
    assert unipar("--version").out == "unipar 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["chek"], "No such command 'chek'"),
        (["run"], "Missing argument 'FILE...'"),
        (["run", "x.yaml", "--bakend", "native"], "No such option"),
        (["verify", "x.yaml", "--resume", "--from", "y"], "give --resume, to save and go on from there, or --from"),
    ],
)
def test_a_wrong_command(unipar: Any, words: list[str], sentence: str) -> None:
    """Exit 2 and what was wrong with it."""
    answer = unipar(*words)
    assert answer.code == 2
    assert sentence in answer.err


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            ["scale", "x.yaml", "--world", "2"],
            2,
            "--world: 2 does not scale: give two sizes or more, each of at least 1 (--world 1,2)",
        ),
        (["check", "y.yaml"], 2, "there is no file y.yaml; did you mean x.yaml?"),
        (
            ["check", "x.yaml", "--set", "train.stps=3"],
            2,
            "x.yaml: train.stps (--set): there is no such key; did you mean 'steps'?",
        ),
        (
            ["run", "x.yaml", "--set", "batch.total=9"],
            2,
            "batch.total (9) is not a multiple of accumulate x data (1 x 2 = 2); the nearest totals are 8 and 10",
        ),
        (
            ["run", "x.yaml", "--resume"],
            2,
            "--resume: there is no run runs/x to go on with; start it without --resume",
        ),
        (
            ["run", "x.yaml", "--set", "task.use=net.py:Nat"],
            2,
            "task.use: {folder}/net.py has no class Nat; did you mean Net?",
        ),
        (
            ["run", "x.yaml", "--backend", "horovod/optimizer"],
            3,
            "horovod/optimizer: there is no such strategy; horovod has: horovod/nothing",
        ),
        (
            ["explain", "x.yaml", "--strategy", "natve"],
            3,
            "no backend 'natve'; did you mean 'native'? known: accelerate, deepspeed, horovod, native, single",
        ),
        (
            ["check", "x.yaml", "--backend", "native/everything"],
            2,
            "'native/everything' is not a strategy: write backend/shard or backend/shard+variant, where shard is one "
            "of nothing, optimizer, gradients, parameters (a bare backend means /nothing)",
        ),
        (["schema", "--write", "nowhere/x.json"], 2, "nowhere/x.json cannot be written: No such file or directory"),
    ],
)
def test_an_error_is_one_paragraph(unipar: Any, folder: Path, words: list[str], code: int, sentence: str) -> None:
    """On stderr, after the program's name, with the exit code of its kind."""
    answer = unipar(*words)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err == f"unipar: {sentence.format(folder=folder)}\n"


def _never(file: str) -> bool:
    """No file is the user's."""
    return False


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (WorkerFailed("rank 1 raised ValueError: no"), 1, "rank 1 raised ValueError: no"),
        (Hung("rank 1 fell silent"), 1, "rank 1 fell silent"),
        (NonFinite("the loss of step 3 is nan on rank 1"), 1, "the loss of step 3 is nan on rank 1"),
        (Stopped("stopped after step 3"), 130, "stopped after step 3"),
        (RuntimeError("what?"), 1, "RuntimeError: what? (unexpected; --debug shows where)"),
    ],
)
def test_what_a_run_may_end_with(
    unipar: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, sentence: str
) -> None:
    """Each kind has its exit code; what nobody foresaw says so."""

    def launch(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("unipar.launcher.launch.launch", launch)
    monkeypatch.setattr("unipar.utils.tracebacks.is_user_file", _never)
    answer = unipar("run", "x.yaml")
    assert (answer.code, answer.err) == (code, f"unipar: {sentence}\n")


def test_an_error_in_the_users_code_says_where(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a process that is a rank itself, as under torchrun, ends with the place in the user's code."""

    def loss(*_: Any, **__: Any) -> Any:
        raise ValueError("bad value")

    monkeypatch.setattr("unipar.launcher.launch.launch", loss)
    answer = unipar("run", "x.yaml")
    assert re.fullmatch(r"unipar: ValueError: bad value \(.*test_app\.py:\d+, in loss\)\n", answer.err)


def test_interrupted(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no error of ours."""

    def launch(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("unipar.launcher.launch.launch", launch)
    answer = unipar("run", "x.yaml")
    assert answer.code == 130
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("words", [["--debug", "check", "y.yaml"], ["check", "y.yaml", "--debug"]])
def test_debug_shows_the_traceback(unipar: Any, words: list[str]) -> None:
    """Wherever it is typed; the sentence still comes last."""
    answer = unipar(*words)
    assert answer.err.startswith("Traceback (most recent call last):\n")
    assert answer.err.endswith("\nunipar: there is no file y.yaml; did you mean x.yaml?\n")


def test_run_hands_over_what_was_typed(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategy, changes, folder and overwriting reach launch; its report is printed."""
    given: dict[str, Any] = {}

    def launch(source: Any, *, overwrite: bool, debug_rank: int | None) -> str:
        given.update(config=source.config, overwrite=overwrite, origins=source.origins, debug_rank=debug_rank)
        return "the report"

    monkeypatch.setattr("unipar.launcher.launch.launch", launch)
    words = "run x.yaml --backend native/parameters --set train.steps=7 --set train.seed=1 --out there --overwrite"
    words += " --debug-rank 1"
    answer = unipar(*words.split(), "--local_rank=1")
    assert (answer.code, answer.out) == (0, "the report\n")
    config = given["config"]
    assert (config.backend, config.parallel.shard) == ("native", "parameters")
    assert (config.train.steps, config.train.seed, config.out) == (7, 1, "there")
    assert given["overwrite"] is True
    assert given["debug_rank"] == 1
    assert given["origins"]["out"] == "--out"


@pytest.mark.parametrize(("rank", "out"), [("0", "the report\n"), ("1", "")])
def test_one_rank_prints_the_report(unipar: Any, monkeypatch: pytest.MonkeyPatch, rank: str, out: str) -> None:
    """Under a foreign launcher every rank is a command line of its own."""
    world = {"TORCHELASTIC_RUN_ID": "1", "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    for name, value in (world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)

    def launch(*_: Any, **__: Any) -> str:
        return "the report"

    monkeypatch.setattr("unipar.launcher.launch.launch", launch)
    assert unipar("run", "x.yaml").out == out


@pytest.mark.parametrize("words", [["--local_rank=1"], ["--local-rank", "1"]])
def test_what_launchers_add_is_swallowed(unipar: Any, words: list[str]) -> None:
    """Before the command or after it."""
    assert unipar(*words, "check", "x.yaml").code == 0
    assert unipar("check", "x.yaml", *words).code == 0


def test_check(unipar: Any) -> None:
    """The answer is on stdout."""
    answer = unipar("check", "x.yaml")
    assert answer.code == 0
    assert answer.out.startswith("x.yaml: good\n  strategy  native/nothing, 2 ranks on cpu\n")


AGREES = "native/nothing agrees with one process bit for bit, over 3 steps"


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (
            compared(ONE, SAME),
            [
                "next: unipar verify x.yaml",
                "      unipar scale x.yaml --world 1,2",
                "      unipar compare x.yaml --details   # all tables, and what they mean",
            ],
        ),
        (
            compared(ONE, FAR),
            ["next: unipar verify x.yaml --strategy deepspeed/gradients"],
        ),
        (
            compared(ONE, SAME, StrategyResult(strategy="x", outcome="failed", note="rank 1 died")),
            ["next: unipar compare x.yaml --details   # runs what failed again"],
        ),
        (
            compared(ONE, SAME, interrupted=True),
            ["next: unipar compare x.yaml   # the same again goes on where it stopped"],
        ),
    ],
    ids=["agrees", "disagrees", "failed", "interrupted"],
)
def test_what_to_try_next(unipar: Any, monkeypatch: pytest.MonkeyPatch, result: Comparison, lines: list[str]) -> None:
    """A comparison ends with commands that fit its outcome; one that is too long for the screen has no comment."""

    def give(*_: Any, **__: Any) -> Comparison:
        return result

    monkeypatch.setattr("unipar.comparison.compare.compare", give)
    answer = unipar("compare", "x.yaml")
    assert (answer.code, answer.out.splitlines()[-len(lines) :]) == (result.code, lines)


def test_details(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables and remarks instead of the screen, and the same commands to try next."""

    def give(*_: Any, **__: Any) -> Comparison:
        return compared(ONE, SAME)

    monkeypatch.setattr("unipar.comparison.compare.compare", give)
    said = unipar("compare", "x.yaml", "--details").out
    assert said.startswith(compared(ONE, SAME).table(80) + "\nnext: unipar verify x.yaml\n")
    assert unipar("compare", "x.yaml").out.startswith(f"{AGREES}\nRSS: ")


CALLED = {
    "compare": "unipar.comparison.compare.compare",
    "scale": "unipar.comparison.scale.scale",
    "verify": "unipar.verification.verify.verify",
    "explain": "unipar.cli.commands.config.explain.explain_config",
    "plan": "unipar.comparison.make_plan.plan",
}
"""The function behind each command that takes strategies."""


@pytest.mark.parametrize("verb", ["compare", "scale", "verify", "explain", "plan"])
def test_strategies_may_have_commas_between_them(unipar: Any, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Strategies may be separated by commas, as numbers of ranks are, and the option may be repeated."""
    asked: list[Any] = []

    def met(_: Any, /, *words: Any, **named: Any) -> None:
        asked.extend(words[0] if verb == "explain" else named["strategies"])
        raise ConfigError("far enough")

    monkeypatch.setattr(CALLED[verb], met)
    world = ["--world", "1,2"] if verb == "scale" else []
    assert (
        unipar(verb, "x.yaml", "--strategy", "single, native/nothing,", "--strategy", "deepspeed/*", *world).code == 2
    )
    assert asked == ["single", "native/nothing", "deepspeed/*"]


def test_verify_of_a_backend(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--backend` of verify names strategies, as `--strategy` does."""
    asked: list[Any] = []

    def met(_: Any, /, **named: Any) -> None:
        asked.extend(named["strategies"])
        raise ConfigError("far enough")

    monkeypatch.setattr(CALLED["verify"], met)
    assert unipar("verify", "x.yaml", "--backend", "native/parameters", "--backend", "horovod").code == 2
    assert asked == ["native/parameters", "horovod"]


def test_plan_ends_at_once(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after Ctrl-C: Python does not collect what was traced when it exits. Into a pipe goes no word of waiting."""
    registered: list[Any] = []
    monkeypatch.setattr("atexit.register", registered.append)

    def interrupted(*_: Any, **__: Any) -> None:
        assert registered == [gc.freeze]
        raise KeyboardInterrupt

    monkeypatch.setattr(CALLED["plan"], interrupted)
    answer = unipar("plan", "x.yaml")
    assert (answer.code, answer.out, answer.err) == (130, "", "")


def test_explain(unipar: Any) -> None:
    """Plain text into a pipe, JSON when asked for."""
    assert "train.steps                            2" in unipar("explain", "x.yaml").out
    told = json.loads(unipar("explain", "x.yaml", "--json", "--strategy", "single").out)
    assert [strategy["strategy"] for strategy in told["strategies"]] == ["single"]


def test_explain_another_backend(unipar: Any) -> None:
    """`--backend` moves the whole run into that strategy, as it does for run and check."""
    told = json.loads(unipar("explain", "x.yaml", "--json", "--backend", "native/parameters").out)
    assert [strategy["strategy"] for strategy in told["strategies"]] == ["native/parameters"]
    values = {row["key"]: (row["value"], row["origin"]) for row in told["values"]}
    assert (values["backend"], values["parallel.shard"]) == (("native", "--backend"), ("parameters", "--backend"))


def test_the_tasks_file_has_no_arguments(unipar: Any) -> None:
    """Words of the command line are the program's: a parser at the top of the task's file gives its defaults."""
    parser = "import argparse, unipar\nargparse.ArgumentParser().parse_args()\n"
    Path("net.py").write_text(parser + NET.replace("Net:", "Net(unipar.Task):"), "utf-8")
    answer = unipar("check", "x.yaml", "--deep")
    assert (answer.code, answer.err) == (0, "")
    assert "net.py:Net, imported and created" in answer.out


def test_schema(unipar: Any) -> None:
    """Printed, or into a file; the same."""
    printed = unipar("schema").out
    assert unipar("schema", "--write", "s.json").out == ""
    assert Path("s.json").read_text("utf-8") == printed


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_as_a_module() -> None:
    """`python -m unipar` is how launchers start it."""
    answer = typed("-m", "unipar", "check", "y.yaml")
    assert (answer.returncode, answer.stderr) == (2, "unipar: there is no file y.yaml; did you mean x.yaml?\n")


@pytest.mark.parametrize(
    "words",
    [
        "check x.yaml",
        "explain x.yaml --compare",
        "schema",
        "run x.yaml --set batch.total=9",
        "run x.yaml --backend natve",
        "compare x.yaml --set train.steps=1",
    ],
)
def test_no_torch_before_a_process_starts(words: str) -> None:
    """Commands that need no process import neither torch nor numpy."""
    program = (
        f"import sys; sys.argv = ['unipar', *{words.split()!r}]\n"
        "from unipar.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: print('loaded:', *[m for m in ('torch', 'numpy') if m in sys.modules])\n"
    )
    answer = typed("-c", program)
    assert answer.stdout.rpartition("loaded:")[2].split() == []
    assert "loaded:" in answer.stdout


def test_help_of_a_command_by_the_word_help(unipar: Any) -> None:
    """As `COMMAND --help`; alone it lists the commands."""
    assert unipar("help", "plan").out == unipar("plan", "--help").out
    assert unipar("help").out == unipar("--help").out


@pytest.mark.parametrize(("typed", "completed"), [("unipar comp", "compare"), ("unipar run --ov", "--overwrite")])
def test_a_shell_completes(unipar: Any, monkeypatch: pytest.MonkeyPatch, typed: str, completed: str) -> None:
    """Commands and their options, after `unipar --install-completion`."""
    monkeypatch.setenv("_UNIPAR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert unipar().out.split() == [completed]
