"""Silent errors of our own, planted again one by one in a copy of the code: `make planted` shows what finds each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.corpus.planted_fault import Planted
from tests.corpus.planted_on_device import DEVICE_FAULTS
from unipar.utils.table import format_table

ROOT = Path(__file__).parents[2]
COPIED = ("unipar", "backends", "tests", "benchmarks", "tools", "configs", "docs", "examples")
HAND_LOOPS = "tests/training/test_hand_loops.py"
SCRIPTS = "tests/task/test_script_values.py"
CHECKS = "tests/backend/test_checks.py"


FAULTS = (
    Planted(
        "A model of from_pretrained trains in eval mode, without dropout.",
        "unipar/training/setup.py",
        "modes = enter_training_mode(model, keep=task.keep_modes)",
        "modes = enter_training_mode(model, keep=True)",
        f"{HAND_LOOPS}::test_one_process[from_pretrained with dropout]",
    ),
    Planted(
        "A frozen teacher in eval mode is put into training mode.",
        "unipar/model/modes.py",
        "if not name or _is_trained_model(inner))",
        ")",
        f"{HAND_LOOPS}::test_one_process[frozen teacher]",
    ),
    Planted(
        "The warmup is not counted.",
        "unipar/config/sections/schedule.py",
        "if step < warmup else after(",
        "if step < 0 else after(",
        f"{HAND_LOOPS}::test_one_process[warmup]",
    ),
    Planted(
        "Microbatches count alike, however many words they have.",
        "unipar/training/local_batches.py",
        'self._weighs = task.defines("weight")',
        "self._weighs = False",
        f"{HAND_LOOPS}::test_one_process[padding with -100]",
    ),
    Planted(
        "--backend native/nothing drops parallel.tensor.",
        "unipar/backend/offered_strategies.py",
        "kept = config.parallel.model_copy(update=parallel)",
        'kept = config.parallel.model_copy(update={"tensor": 1, **parallel})',
        f"{CHECKS}::test_settings_are_obeyed",
    ),
    Planted(
        "An option that has no effect in its strategy is ignored.",
        "unipar/backend/checks.py",
        "for key, why in backend.idle_options(config) if config.options else ():",
        "for key, why in ():",
        f"{CHECKS}::test_contradictions_are_refused",
    ),
    Planted(
        "Flags of accelerate launch are ignored under another backend.",
        "unipar/backend/checks.py",
        "    for other in map(find_backend, backend_names()):\n",
        "    for other in (backend,):\n",
        f"{CHECKS}::test_launchers_are_not_ignored",
    ),
    Planted(
        "A loader's collate_fn is ignored beside the task's collate.",
        "unipar/data/dataset.py",
        "if collate is not None and loader.collate_fn not in (default_collate, collate):",
        "if False:",
        "tests/data/test_microbatch_loader.py::test_a_collate_fn_beside_the_tasks_collate",
    ),
    Planted(
        "A task's misspelt method is not called.",
        "unipar/task/task.py",
        "if near and near[0] not in defined:",
        "if False:",
        "tests/task/test_task.py::test_a_misspelt_method",
    ),
    Planted(
        "The logged rate is the config's, where groups have rates of their own.",
        "unipar/training/trained_parts.py",
        "rates = self.engine.learning_rates() or [float(base * self._factor) for base in self.rates]",
        "rates = [self.config.train.optimizer.lr * self._factor]",
        f"{HAND_LOOPS}::test_one_process[own groups]",
    ),
    Planted(
        "A run that goes on forgets the checkpoint.every of its first command.",
        "unipar/launcher/preparation/earlier_config.py",
        "source = with_earlier_changes(source, kept)",
        "source = with_earlier_changes(source, [])",
        "tests/launcher/test_earlier_config.py::test_what_the_earlier_command_set_is_kept",
    ),
    Planted(
        "Ranks have other arguments than the script.",
        "unipar/task/reference.py",
        "sys.argv = list(self.argv)",
        "sys.argv = sys.argv[:1]",
        f"{SCRIPTS}::test_arguments_of_the_script",
    ),
    Planted(
        "What the script has set in its variables is lost in the ranks.",
        "unipar/task/reference.py",
        "values = collect_script_values([] if known is None else [known])",
        "values = collect_script_values([])",
        f"{SCRIPTS}::test_a_class_named_in_the_config",
    ),
    Planted(
        "An import of the Trainer's arguments has all parameters decay.",
        "unipar/conversion/import_config.py",
        'reading.put("train.optimizer.decay", "transformers")',
        'reading.put("train.optimizer.decay", "all")',
        "tests/conversion/test_trainer_recipes.py::test_each_step[gpt2]",
    ),
    Planted(
        "verify's first line does not count the strategies that cannot run.",
        "unipar/results/verdicts.py",
        'row.outcome in ("refused", "absent") and not row.alone',
        'row.outcome == "absent" and not row.alone',
        "tests/results/test_verdicts.py::test_summary",
    ),
    Planted(
        "verify misses a router's auxiliary loss of weight 0.001.",
        "unipar/verification/worker/task_probe.py",
        '"apart": differs or bool(off),',
        '"apart": differs,',
        "tests/verification/test_task_probe.py::test_a_balance_of_experts_depends_on_the_cut[0.001]",
    ),
)


def copy_code(folder: Path) -> None:
    """Copy what tests need into an empty folder."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run these tests on a copy of the code."""
    words = ["-q", "--tb=line", "-p", "no:cacheprovider", "-n", "0", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", *words, *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "backends")])}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def look_for(fault: Planted, copy: Path) -> str:
    """Return `found` if the fault's test fails with it, else why not."""
    with fault.planted(copy):
        done = run_tests(copy, [fault.found_by])
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if done.returncode == 0:
        return f"not found: {last}"
    asserted = re.search(r":\d+: (assert |AssertionError|Failed: )", done.stdout)
    return "found" if done.returncode == 1 and asserted else f"the test ended otherwise: {last}"


GROUPS = {"": FAULTS, "emulated": DEVICE_FAULTS}
"""Tables of faults by the word that asks for one; of the second, `words` may name some by a part of their sentence."""


def main(group: str = "", *words: str) -> int:
    """Plant each fault of a group, print what finds it, and return 1 if anything is not found."""
    faults = [fault for fault in GROUPS[group] if not words or any(word in fault.fault for word in words)]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        copy_code(copy)
        done = run_tests(copy, sorted({fault.found_by for fault in faults}))
        if done.returncode:
            print(f"{done.stdout}\n{done.stderr}\nThe tests fail without a fault.", file=sys.stderr)
            return 1
        results: list[str] = []
        for fault in faults:
            results.append(look_for(fault, copy))
            print(f"{fault.fault} {results[-1]}", file=sys.stderr, flush=True)
    rows = [(f.fault, f.file, f.found_by, result) for f, result in zip(faults, results, strict=True)]
    print(format_table(("fault", "file", "found by", "result"), rows, width=240))
    return int(any(result != "found" for result in results))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
