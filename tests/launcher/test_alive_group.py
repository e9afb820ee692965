"""A process group that is alive before unipar, as Ray Train makes one: each backend trains in it, and leaves it."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from tests.support.forks import BACKENDS, Forks
from unipar.backend import registry

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
import torch.distributed as dist
import unipar
from tests.support.tiny import CONFIG, Tiny

dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
for backend in sys.argv[3:]:
    own = {**CONFIG, "backend": backend, "parallel": {"data": "auto"}, "out": backend}
    report = unipar.launch(own, task=Tiny, quiet=True)
    print(backend, report.size, f"{report.losses[-1][1]:.6f}")
alive = torch.ones(1)
dist.all_reduce(alive)
print("alive", alive.item())
"""


def test_it_is_adopted_and_left_alive(tmp_path: Path, forks: Forks) -> None:
    """No variable says a rank here: who they are is asked of the group, and its store is where they meet."""
    here = [name for name in BACKENDS if registry.why_not_installed(registry.find_backend(name)) is None]
    (tmp_path / "x.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n{SCRIPT}", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with ExitStack() as both:
        ranks = [both.enter_context(forks.begin(["x.py", port, str(rank), *here], tmp_path)) for rank in range(2)]
        done = [rank.wait(150) for rank in ranks]
    for rank in done:
        assert [line for line in rank.stdout.splitlines() if line != "trained 12"] == [
            *(f"{name} 2 3.385748" for name in here),
            "alive 2.0",
        ], rank.stderr
