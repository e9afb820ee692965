"""Small lives for the workers of launcher tests: `tests.support.entries:NAME`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import unipar
from unipar.distributed.place import Place
from unipar.errors import NonFinite, Stopped, UniparError
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task import pickled

Control = socket.socket | None
FOREVER = 600.0


def fine(place: Place, run: Path, control: Control) -> None:
    """Says where it is, and ends."""
    seen = {"OMP": os.environ["OMP_NUM_THREADS"], "TMPDIR": os.environ["TMPDIR"], "sid": os.getsid(0) == os.getpid()}
    (run / f"seen-{place.rank}").write_text(f"{place.rank} of {place.size} {seen}", "utf-8")
    Path(os.environ["TMPDIR"], "left").write_text("behind", "utf-8")


def handed(place: Place, run: Path, control: Control) -> None:
    """Says how much its parent gave it."""
    (run / f"seen-{place.rank}").write_text(str(len(pickled.unpickle_task())), "utf-8")


def first_raises(place: Place, run: Path, control: Control) -> None:
    """Rank 1 fails; the others would sleep on."""
    if place.rank == 1:
        raise ValueError("the batch is empty\nand more")
    time.sleep(FOREVER)


def refuses(place: Place, run: Path, control: Control) -> None:
    raise NonFinite("the loss is not finite at step 3")


def exits_seven(place: Place, run: Path, control: Control) -> None:
    if place.rank == 1:
        print("about to go", flush=True)
        os._exit(7)
    time.sleep(FOREVER)


def killed(place: Place, run: Path, control: Control) -> None:
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


def mismatched(place: Place, run: Path, control: Control) -> None:
    """Writes what gloo writes when ranks reduce different sizes, and aborts as it does."""
    if place.rank == 0:
        sys.stderr.write("op.preamble.length <= op.nbytes. 4 vs 16: Received data size doesn't match expected size\n")
        sys.stderr.flush()
        os.abort()
    time.sleep(FOREVER)


def echoes(place: Place, run: Path, control: Control) -> None:
    """Rank 0 sees its peer go and says so first; the peer is slower to say why it goes."""
    _all_begun(place, run)
    if place.rank == 0:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")
    while not (run / "rank-0.error.json").exists():
        time.sleep(0.01)
    raise KeyError("labels")


def ends_early(place: Place, run: Path, control: Control) -> None:
    """Rank 1 ends well before rank 0 is through with it."""
    _all_begun(place, run)
    if place.rank == 0:
        time.sleep(0.2)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")


def stubborn(place: Place, run: Path, control: Control) -> None:
    """Rank 1 fails, rank 0 hears no SIGTERM."""
    if place.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (run / "deaf").touch()
        time.sleep(FOREVER)
    while not (run / "deaf").exists():
        time.sleep(0.01)
    raise ValueError("no")


def with_helpers(place: Place, run: Path, control: Control) -> None:
    """Each rank has a data worker; rank 1 fails when both are there."""
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(FOREVER,))
    helper.start()
    (run / f"helper-{place.rank}").write_text(str(helper.pid), "utf-8")
    while place.rank == 1 and not (run / "helper-0").exists():
        time.sleep(0.01)
    if place.rank == 1 and not (run / "stay").exists():
        os._exit(3)
    time.sleep(FOREVER)


def steps(place: Place, run: Path, control: Control) -> None:
    """Counts steps until it is asked to stop, at a boundary."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    heartbeat = HeartbeatWriter(heartbeat_path(run, place.rank))
    with RunLog(run_log_path(run, place.rank)) as run_log:
        for step in range(1, 10_000):
            heartbeat.step = step
            heartbeat.set_phase("forward")
            time.sleep(0.01)
            heartbeat.set_phase("between")
            if asked:
                run_log.note("stopped", step=step)
                raise Stopped(f"stopped after step {step}")


def deaf_steps(place: Place, run: Path, control: Control) -> None:
    """Never reaches a boundary."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heartbeat = HeartbeatWriter(heartbeat_path(run, place.rank))
    heartbeat.step = 5
    heartbeat.set_phase("forward")
    time.sleep(FOREVER)


def _beating(place: Place, run: Path, step: int, phase: str) -> None:
    _all_begun(place, run)  # a rank that is started late must not look silent
    heartbeat = HeartbeatWriter(heartbeat_path(run, place.rank))
    heartbeat.step = step
    heartbeat.set_phase(phase)


def sleeps_behind(place: Place, run: Path, control: Control) -> None:
    """Both are silent; rank 1 is a step behind."""
    _beating(place, run, 3 if place.rank == 1 else 4, "forward")
    time.sleep(FOREVER)


def sleeps_outside(place: Place, run: Path, control: Control) -> None:
    """Both are silent in one phase; rank 0 waits in a collective (its file looks like one)."""
    _beating(place, run, 3, "backward")
    if place.rank == 0:
        _waits_for_ever()
    time.sleep(FOREVER)


def sleeps_alike(place: Place, run: Path, control: Control) -> None:
    _beating(place, run, 3, "backward")
    time.sleep(FOREVER)


def _waits_for_ever(file: str = "/x/torch/distributed/c10d.py") -> None:
    """In a collective, by the file's name."""
    wait = compile("import time\ndef all_reduce():\n time.sleep(600)\n", file, "exec")
    names: dict[str, object] = {}
    exec(wait, names)
    names["all_reduce"]()  # type: ignore[operator]


def _all_begun(place: Place, run: Path) -> None:
    (run / f"up-{place.rank}").touch()
    while not all((run / f"up-{rank}").exists() for rank in range(place.size)):
        time.sleep(0.01)


def waits_in_vain(place: Place, run: Path, control: Control) -> None:
    """Rank 0 has waited as long as it may, in gloo's words; 2 and 3 (for a store) still wait, for rank 1."""
    _beating(place, run, 1, "backward")
    if place.rank == 0:
        raise RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete")
    if place.rank == 2:
        _waits_for_ever()
    if place.rank == 3:
        _waits_for_ever(str(Path(unipar.__file__).parent / "training" / "run.py"))
    time.sleep(FOREVER)


def watchdog(place: Place, run: Path, control: Control) -> None:
    """Rank 0 is ended by NCCL's watchdog; rank 1 hangs in its first step."""
    _beating(place, run, 1, "forward")
    if place.rank == 0:
        sys.stderr.write("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\n")
        sys.stderr.flush()
        os.abort()
    time.sleep(FOREVER)


def never_begins(place: Place, run: Path, control: Control) -> None:
    """Rank 0 hangs in the user's imports; rank 1 waits for an answer from it, for ever."""
    if place.rank == 1:
        HeartbeatWriter(heartbeat_path(run, place.rank))
        _waits_for_ever()
    time.sleep(FOREVER)


def both_wait(place: Place, run: Path, control: Control) -> None:
    """Rank 0 gives up in a collective, and rank 1 is in one too."""
    _beating(place, run, 1, "backward")
    if place.rank == 0:
        raise RuntimeError("wait timeout after 1000ms, keys: /unipar/1/samples")
    _waits_for_ever()


def stops_itself(place: Place, run: Path, control: Control) -> None:
    _beating(place, run, 3, "backward")
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(FOREVER)


def patient(place: Place, run: Path, control: Control) -> None:
    """Silent for longer than a heartbeat, where that is allowed: before step 1 is done, waiting, at the end."""
    heartbeat = HeartbeatWriter(heartbeat_path(run, place.rank))
    for step, phase in ((1, "forward"), (7, "waiting"), (7, "end")):
        heartbeat.step = step
        heartbeat.set_phase(phase)
        time.sleep(0.5)


def answers(place: Place, run: Path, control: Control) -> None:
    """Says each word back, with its rank, until it is told to go."""
    assert control is not None
    while (said := control.recv(1024)) != b"go":
        control.send(said + str(place.rank).encode())


def mute(place: Place, run: Path, control: Control) -> None:
    """Ends without a word."""


def sleeps(place: Place, run: Path, control: Control) -> None:
    (run / f"up-{place.rank}").write_text(str(os.getpid()), "utf-8")
    time.sleep(FOREVER)


def spawns(place: Place, run: Path, control: Control) -> None:
    """Starts a process that outlives it, if nobody looks."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (run / f"helper-{place.rank}").write_text(str(child.pid), "utf-8")


def reduces(place: Place, run: Path, control: Control) -> None:
    """A real group: the sum over ranks."""
    import torch

    from unipar.backend.joining import meet
    from unipar.config import Config

    config = Config.model_validate({"device": "cpu", "batch": {"total": 4}, "train": {"steps": 1}})
    world = meet(config, place)
    total = world.sum(torch.tensor([float(place.rank + 1)]))
    (run / f"sum-{place.rank}").write_text(str(total.item()), "utf-8")
    (run / f"listens-{place.rank}").write_text(" ".join(_listening()), "utf-8")
    world.barrier()
    world.close()


def _listening() -> list[str]:
    """Addresses that this process listens on; `*` stands for all."""
    mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.exists()}
    found: list[str] = []
    for table in ("tcp", "tcp6"):
        for row in Path("/proc/self/net", table).read_text("ascii").splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                address = words[1].partition(":")[0]
                found.append("127.0.0.1" if address == "0100007F" else address)
    return found


def reduces_unequal(place: Place, run: Path, control: Control) -> None:
    """A real group, and the mistake that makes gloo abort."""
    import torch

    from unipar.backend.joining import meet
    from unipar.config import Config

    config = Config.model_validate({"device": "cpu", "batch": {"total": 4}, "train": {"steps": 1}})
    world = meet(config, place)
    world.sum(torch.ones(100_000 if place.rank else 4))
    world.close()


def never_reduces(place: Place, run: Path, control: Control) -> None:
    """A real group whose rank 1 does not come to its first collective."""
    import torch

    from unipar.backend.joining import meet
    from unipar.config import Config

    launch = {"heartbeat": 0.5, "timeout": 1.0}
    base = {"device": "cpu", "batch": {"total": 4}, "train": {"steps": 1}}
    world = meet(Config.model_validate({**base, "launch": launch}), place)
    if place.rank == 1:
        time.sleep(FOREVER)
    world.sum(torch.ones(4))


def _in_group(place: Place, run: Path) -> None:
    """Meet in a real group, sum once, and come to step 3."""
    import torch
    import torch.distributed as dist

    from unipar.backend.joining import meet
    from unipar.config import Config

    meet(Config.model_validate({"device": "cpu", "batch": {"total": 4}, "train": {"steps": 1}}), place)
    dist.all_reduce(torch.ones(2))
    _beating(place, run, 3, "backward")


def misses_a_sum(place: Place, run: Path, control: Control) -> None:
    """A real group whose rank 1 does not come to a sum."""
    _in_group(place, run)
    import torch
    import torch.distributed as dist

    if place.rank == 1:
        time.sleep(FOREVER)
    dist.all_reduce(torch.ones(3, 5))


def sum_in_two_groups(place: Place, run: Path, control: Control) -> None:
    """A real group whose ranks take their sums in different orders, and so both wait."""
    _in_group(place, run)
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1], group_desc=name) for name in ("rows", "columns")]
    dist.all_reduce(torch.ones(4 + place.rank), group=groups[place.rank])


def unknown(place: Place, run: Path, control: Control) -> None:
    class Odd(UniparError): ...

    raise Odd("nobody knows this one")


def exits_well(place: Place, run: Path, control: Control) -> None:
    sys.exit()


def exits_with_code(place: Place, run: Path, control: Control) -> None:
    sys.exit(4)


def exits_with_words(place: Place, run: Path, control: Control) -> None:
    sys.exit("no")


def speaks(place: Place, run: Path, control: Control) -> None:
    print("out")
    sys.stderr.write("err\n")
    os.write(1, b"below\n")


_seen: list[str] = []


def remembers(place: Place, run: Path, control: Control) -> None:
    """Whether this process was used before, where it is and what is its own."""
    _seen.append(os.environ["NAMED"])
    own = os.environ["TMPDIR"] == tempfile.gettempdir()
    (run / "remembered").write_text(f"{_seen} {os.getcwd()} {own}", "utf-8")


def tells_what_it_has(place: Place, run: Path, control: socket.socket | None) -> None:
    """Write what this process has that a script could have left in it."""
    from unipar.utils import procfs

    print("printed at once")  # read from the log before this process ends
    told = {
        "torch": "torch" in sys.modules,
        "beside": "beside" in sys.modules,
        "main": [name for name in vars(sys.modules["__main__"]) if not name.startswith("__")],
        "argv": [Path(word).name for word in sys.argv],
        "path": str(run) in sys.path,
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "stdin": sys.stdin.read(),
        "threads": sys.modules["torch"].get_num_threads(),
        "fork": procfs.shared_bytes() > 0,
        "seeded": not sys.modules["torch"].random.get_rng_state().equal(sys.modules["torch"].Generator().get_state()),
    }
    (run / "told.json").write_text(json.dumps(told), encoding="utf-8")


def loads_a_task(place: Place, run: Path, control: Control) -> None:
    """Load the task of ref.json, and say what its model() returns."""
    from unipar.task.reference import TaskRef

    task = TaskRef.from_json(json.loads((run / "ref.json").read_text("utf-8"))).load()
    (run / f"seen-{place.rank}").write_text(f"{task.model()} {sys.argv}", "utf-8")
