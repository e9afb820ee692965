"""A command that is observed runs as it would without: its output, its exit code, its signals, its numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from unipar.errors import ConfigError
from unipar.memory.account import read_account
from unipar.observing.command import observed_environment, prepare_folder, why_nothing
from unipar.observing.settings import ObserveSettings

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.17g}")
    END
"""


def observe(
    folder: Path, command: Sequence[str], *options: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Observe a command; its results go to `folder`/out."""
    words = [sys.executable, "-m", "unipar", "observe", "--out", str(folder / "out"), *options, "--", *command]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=False
    )


def script(folder: Path, end: str = "", text: str = SCRIPT) -> str:
    """Write the script with a last line of its loop, and return its path."""
    path = folder / "train.py"
    path.write_text(text.replace("END", end), "utf-8")
    return str(path)


def test_numbers_and_output_are_the_scripts_own(tmp_path: Path) -> None:
    """Every bit of every loss is that of the script alone, and standard output holds nothing else."""
    words = [sys.executable, script(tmp_path)]
    alone = subprocess.run(words, capture_output=True, text=True, check=True)
    observed = observe(tmp_path, words)
    assert observed.returncode == 0, observed.stderr
    assert observed.stdout == alone.stdout
    assert "12 steps" in observed.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "observed.json", "rank-0.jsonl", "rank-0.memory.json", "rank-0.observed.json", "report.html"
    }  # fmt: skip


def test_imports_of_the_first_optimizer_are_nobodys(tmp_path: Path) -> None:
    """What torch imports with the first optimizer (20 MiB) is in no account."""
    observe(tmp_path, [sys.executable, script(tmp_path)])
    assert 0 < read_account(tmp_path / "out", 0).peak.held["runtime"] < 2 * 2**20


def test_nothing_is_imported_under_a_default_device(tmp_path: Path) -> None:
    """Modules that are imported early would make their tensors on a device that the script has set for its own."""
    text = SCRIPT.replace("optimizer =", "assert 'torch._dynamo' not in sys.modules\noptimizer =")
    ended = observe(
        tmp_path, [sys.executable, script(tmp_path, text=f"import torch\ntorch.set_default_device('cpu')\n{text}")]
    )
    assert ended.returncode == 0, ended.stderr


def test_exit_code(tmp_path: Path) -> None:
    """The command's exit code is that of `unipar observe`, and what was seen until then is shown."""
    ended = observe(tmp_path, [sys.executable, script(tmp_path, "if step == 6: sys.exit(7)")])
    assert ended.returncode == 7
    assert "7 steps" in ended.stderr


def test_death_by_a_signal(tmp_path: Path) -> None:
    """A command that a signal ends is ended by it, as far as a shell can tell."""
    ended = observe(tmp_path, [sys.executable, script(tmp_path, "import os; step == 6 and os.kill(os.getpid(), 15)")])
    assert ended.returncode == -signal.SIGTERM


def test_an_error_of_the_script(tmp_path: Path) -> None:
    """A traceback of the script names its own lines, and none of unipar's below them."""
    ended = observe(tmp_path, [sys.executable, script(tmp_path, "if step == 6: raise ValueError('mine')")])
    assert ended.returncode == 1
    assert "ValueError: mine" in ended.stderr
    assert "unipar/observing" not in ended.stderr


def test_strict(tmp_path: Path) -> None:
    """With --strict a fault ends with 1, though the script ended well."""
    text = SCRIPT.replace("model.parameters()", "model[0].parameters()")
    ended = observe(tmp_path, [sys.executable, script(tmp_path, text=text)], "--strict")
    assert ended.returncode == 1
    assert "2.weight, 2.bias got gradients and no optimizer has them" in " ".join(ended.stderr.split())


def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C reaches the script, which ends as it likes; what was seen is shown."""
    path = script(tmp_path, "import time; (step == 6) and (print('now', flush=True), time.sleep(60))")
    text = (
        Path(path)
        .read_text("utf-8")
        .replace("import sys", "import sys, signal\nsignal.signal(2, lambda *_: sys.exit(9))")
    )
    Path(path).write_text(text, "utf-8")
    words = [sys.executable, "-m", "unipar", "observe", "--out", str(tmp_path / "out"), "--", sys.executable, path]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "now":
            pass
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 9
    assert "7 steps" in errors


def test_a_signal_to_unipar_alone(tmp_path: Path) -> None:
    """SIGTERM to `unipar observe`, as a job system sends it, goes on to the command."""
    path = script(tmp_path, "import time; (step == 6) and (print('now', flush=True), time.sleep(60))")
    words = [sys.executable, "-m", "unipar", "observe", "--out", str(tmp_path / "out"), "--", sys.executable, path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "now":
            pass
        began = time.monotonic()
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_the_same_signal_again(name: str, tmp_path: Path) -> None:
    """When it has ended the command, a second one does not end what is said about it, as job systems send several."""
    text = f"""
import os, signal
from pathlib import Path
from unipar.observing.command import run_observed
from unipar.observing.settings import ObserveSettings

command = ["sh", "-c", "sleep 0.5; kill -{name} $PPID; sleep 0.5"]
run_observed(command, ObserveSettings(memory=False, folder=Path({str(tmp_path)!r})))
os.kill(os.getpid(), signal.SIG{name})
print("concludes")
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "concludes\n"), ended.stderr


def test_the_users_sitecustomize_runs(tmp_path: Path) -> None:
    """A sitecustomize that was there already still runs."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys; sys.stderr.write('mine runs')", "utf-8")
    path = f"{tmp_path / 'own'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    observed = observe(tmp_path, [sys.executable, script(tmp_path)], environ={"PYTHONPATH": path})
    assert "mine runs" in observed.stderr
    assert "12 steps" in observed.stderr


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    """Shells, programs without torch and data workers leave no files."""
    text = SCRIPT.replace(
        "for step in range(12):",
        "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(24, 8)), 2, num_workers=2)\n"
        "for step, _ in enumerate(data):",
    )
    path = script(tmp_path, text=text)
    command = f"echo one; {sys.executable} -c 'print(2)'; {sys.executable} {path} | tail -n 1"
    observed = observe(tmp_path, ["sh", "-c", command])
    assert observed.stdout.splitlines()[:2] == ["one", "2"]
    assert [path.name for path in (tmp_path / "out").glob("rank-*.jsonl")] == ["rank-0.jsonl"]
    assert "12 steps" in observed.stderr


def test_an_own_error_ends_observing_and_not_the_script(tmp_path: Path) -> None:
    """What goes wrong in unipar is said once, and the script goes on with all functions put back."""
    end = (
        "if step == 6:\n"
        "        import shutil; from pathlib import Path; out = Path('out')\n"
        "        torch.Tensor.__hash__ = lambda self: 1 / 0\n"
        "        from unipar.observing.process import rank_record; rank_record.RankRecord.add_step = None\n"
        "    if step == 11: print(torch.optim.Optimizer.zero_grad.__module__)"
    )
    observed = observe(tmp_path, [sys.executable, script(tmp_path, end)])
    assert observed.returncode == 0
    assert observed.stdout.splitlines()[-1] == "torch.optim.optimizer"
    assert observed.stderr.count("unipar observe: stopped in step 7: TypeError: 'NoneType' object is not callable") == 1


def test_a_script_that_updates_its_weights_itself(tmp_path: Path) -> None:
    """Without a step of an optimizer memory is shown by phase all the same."""
    own = "[p.data.sub_(0.1 * p.grad) for p in model.parameters()]"
    observed = observe(tmp_path, [sys.executable, script(tmp_path, text=SCRIPT.replace("optimizer.step()", own))])
    assert observed.returncode == 0
    assert "no optimizer of torch took a step, so no steps were found" in " ".join(observed.stderr.split())


def test_python_that_ignores_the_environment(tmp_path: Path) -> None:
    """`python -I` cannot be observed, which is said with the reason."""
    observed = observe(tmp_path, [sys.executable, "-I", script(tmp_path)])
    assert observed.returncode == 0
    says = " ".join(observed.stderr.split())
    assert "-I makes Python ignore PYTHONPATH, through which processes are observed" in says


def test_why_nothing_was_observed() -> None:
    """Without a known reason the usual ones are named."""
    assert "mpirun needs -x UNIPAR_OBSERVE" in why_nothing(["sh", "train.sh"])


def test_no_such_program(tmp_path: Path) -> None:
    """A program that is not there is named."""
    observed = observe(tmp_path, ["torchrum", "train.py"])
    assert observed.returncode == 2
    assert "observe: torchrum is not a program on PATH" in observed.stderr


def test_no_command(tmp_path: Path) -> None:
    """Without a command the answer shows one."""
    observed = observe(tmp_path, [])
    assert observed.returncode == 2
    assert "unipar observe -- python train.py" in observed.stderr


def test_the_meter_does_not_replace_another_allocator() -> None:
    """Where jemalloc is preloaded, it stays alone."""
    environ = {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}
    assert observed_environment(ObserveSettings(), environ)["LD_PRELOAD"] == "/usr/lib/libjemalloc.so.2"


def test_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    """A folder with other files is not emptied, not even with --overwrite."""
    (tmp_path / "thesis.tex").write_text("", "utf-8")
    with pytest.raises(ConfigError, match="exists: give --overwrite, or another folder by --out DIR"):
        prepare_folder(tmp_path, overwrite=False)
    with pytest.raises(ConfigError, match=r"holds thesis.tex, which `unipar observe` did not write"):
        prepare_folder(tmp_path, overwrite=True)


def test_results_of_before_are_replaced(tmp_path: Path) -> None:
    """With --overwrite the files of an earlier observation go."""
    (tmp_path / "rank-3.observed.json").write_text("{}", "utf-8")
    assert prepare_folder(tmp_path, overwrite=True) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_dashes(tmp_path: Path) -> None:
    """Options behind the first word are the command's own."""
    words = [sys.executable, "-m", "unipar", "observe", "--out", str(tmp_path / "out"), "echo", "--epochs", "1"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "--epochs 1\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "x"], "steps.0: wanted a whole number above 0, got 'x'"),
        (["--loss", "loss"], "loss: 'loss' names no variable of a file; write it as train.py:loss"),
        (["--config", "o.yaml"], "stepz: there is no such key; did you mean 'steps'?"),
    ],
    ids=["steps", "loss", "config"],
)
def test_a_setting_that_is_wrong(options: list[str], says: str, tmp_path: Path) -> None:
    """The command is not started, and the way out is named."""
    (tmp_path / "o.yaml").write_text("stepz: [3, 4]", "utf-8")
    ended = observe(tmp_path, ["echo", "started"], *options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr
    assert "give a setting as `unipar observe --help` lists them" in ended.stderr
