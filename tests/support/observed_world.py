"""Scripts that are observed on two ranks: variants of a few, each made by exchanging lines, in one started world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unipar.observing.command import observed_environment
from unipar.observing.settings import ObserveSettings

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "observing" / "scripts"
WORLD = Path(__file__).parent / "observed_world_inside.py"


@dataclass(frozen=True)
class Variant:
    """A script with some of its lines exchanged."""

    script: str
    """File in tests/observing/scripts/."""

    edits: Mapping[str, str] = field(default_factory=dict[str, str])
    """Text that the script has once -> what stands there instead."""

    @property
    def text(self) -> str:
        """The script with its edits; raise ValueError if one has no place."""
        text = (SCRIPTS / self.script).read_text("utf-8")
        for old, new in self.edits.items():
            if (times := text.count(old)) != 1:
                raise ValueError(f"{self.script} has {times} times what is to be replaced: {old!r}")
            text = text.replace(old, new)
        return text


def observe_variants(variants: Mapping[str, Variant], folder: Path, *, size: int = 2) -> Mapping[str, Path]:
    """Observe each variant in a world that `torchrun` has started; return the folder of each one's results.

    Each rank of the world forks for each variant, so that torch and the libraries are imported once. The world ends by
    itself: it ends a script that takes too long.
    """
    jobs: list[dict[str, object]] = []
    for number, variant in enumerate(variants.values()):
        results = folder / str(number)
        results.mkdir()
        script = results.with_suffix(".py")
        script.write_text(variant.text, "utf-8")
        settings = ObserveSettings(folder=results, memory=False)
        jobs.append({"script": str(script), "settings": settings.model_dump_json()})
    list_of_jobs = folder / "jobs.json"
    list_of_jobs.write_text(json.dumps(jobs), "utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--rdzv-backend", "c10d"]
    environment = observed_environment(ObserveSettings(folder=folder, memory=False), environment_of_command())
    command = [*torchrun, "--rdzv-endpoint", "127.0.0.1:0", str(WORLD), str(list_of_jobs)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {name: folder / str(number) for number, name in enumerate(variants)}


def environment_of_command() -> dict[str, str]:
    """Return the environment of a command whose processes find unipar here; an error of the observer ends a script."""
    path: Sequence[str] = (str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        "UNIPAR_OBSERVE_RAISE": "1",
    }
