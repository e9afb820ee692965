"""README's commands on a bare Debian that is made on the spot: `make fresh`.

A minimal Debian with the packages that README names and nothing else is put into a folder, and entered in
namespaces of its own: when its first process ends, all others and every mount are gone. The checkout's last commit is
cloned into it, for root and for an ordinary user, who run the commands that README prints. pip's settings and
certificates of this machine count there, too. It takes 10 GB in TMPDIR, which are freed at the end.

Exit codes: 0, all commands succeeded; 1, one failed; 3, no such machine can be made here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
DISK_BYTES = 10e9
"""Bytes on disk: the system 0.6 GB, and for each user a clone with .venv, caches and what tests write."""

MAKING_LIMIT = 600.0
"""Seconds within which the system must be made."""

NO_MACHINE = 3
HOMES = {"root": "/root", "user": "/home/user"}
ALWAYS = ("ca-certificates",)
"""What pip needs besides README's packages where the index has a certificate of its own."""

PASSED_ON = re.compile(r"(?i)PIP_(?!CACHE_DIR)\w+|\w*CERT\w*|\w*CA_BUNDLE|GIT_SSL_CAINFO|(https?|no|all)_proxy")
"""Variables that count on the bare machine, too."""

PIP_FILES = (Path("/etc/pip.conf"), Path("/etc/xdg/pip/pip.conf"))
OWN_PIP_FILES = (Path(".config/pip/pip.conf"), Path(".pip/pip.conf"))
NETWORK_FILES = (Path("/etc/resolv.conf"), Path("/etc/hosts"))
NETWORK_FAILS = re.compile(
    r"WARNING: Retrying \(Retry\(|pip\._vendor\.urllib3\.exceptions\.|ERROR: Could not install .* due to an OSError"
)
"""What pip prints where it does not reach the index."""

NAMESPACES = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
ENTER = """
set -e
root=$1 command=$2
shift 2
mount --bind "$root" "$root"
cd "$root"
mkdir -p proc sys dev mnt
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
[ ! -d dev/shm ] || mount -t tmpfs -o mode=1777 tmpfs dev/shm
while [ "$1" != -- ]; do
    mkdir -p ".$2"
    mount --bind "$2" ".$2"
    [ "$1" = rw ] || mount -o remount,bind,ro ".$2"
    shift 2
done
shift
pivot_root . mnt
cd /
umount -l /mnt
exec chroot . env -i "$@" bash -c "$command
exit \\$?"
"""
"""First process of the machine. Its bash waits for a child, so processes that others leave behind are waited for."""


class NoMachine(Exception):
    """No bare machine can be made; the message says why."""


@dataclass(frozen=True)
class Result:
    """What came of one command."""

    user: str
    command: str
    code: int
    seconds: float
    network: bool = False
    """Whether it failed because pip did not reach the index."""


def say(text: str) -> None:
    print(f"fresh: {text}", flush=True)


def readme_packages(text: str) -> list[str]:
    """Return the packages that README installs with apt."""
    found = re.search(r"`apt install ([^`]+)`", text)
    assert found, "README names no packages of Debian"
    return found[1].split()


def readme_commands(text: str) -> list[str]:
    """Return the commands of README's first block, without their comments."""
    block = text.partition("```console\n")[2].partition("```")[0]
    commands = [line[2:].partition("#")[0].strip() for line in block.splitlines() if line.startswith("$ ")]
    assert commands, "README's first block has no commands"
    return commands


def named_paths(text: str) -> list[str]:
    """Return the paths in a setting of pip's; an index in a folder has its files beside it."""
    found = re.findall(r"(?<![\w:/.~-])(file://)?(/[\w.+/-]*\w)", text)
    return [os.path.dirname(path) if scheme and path.endswith("/simple") else path for scheme, path in found]


def outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are in no other one of them."""
    known = set(folders)
    return sorted(folder for folder in known if not known.intersection(folder.parents))


def mounted_below(folder: Path, table: str) -> list[str]:
    """Return the mount points in a folder, by /proc/self/mountinfo."""
    points = [line.split()[4] for line in table.splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]


def debian_release() -> str:
    """Return the name of this Debian's release, or "" elsewhere."""
    known: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/etc/os-release").read_text("utf-8").splitlines():
            key, _, value = line.partition("=")
            known[key] = value.strip('"')
    return known.get("VERSION_CODENAME", "") if known.get("ID") == "debian" else ""


def apt_sources(own: str, suite: str, apt: Path = Path("/etc/apt")) -> list[str]:
    """Return this machine's sources of its own Debian, as text, for another release where one is asked for."""
    files = [apt / "sources.list", *sorted(apt.glob("sources.list.d/*.list"))]
    files += sorted(apt.glob("sources.list.d/*.sources"))
    texts = [file.read_text("utf-8") for file in files if file.exists()]
    return [text.replace(own, suite) for text in texts if own and own in text]


def variables_passed_on() -> dict[str, str]:
    """Return this machine's variables that count on the bare one, too."""
    return {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}


def reason_no_namespaces() -> str:
    """Return why no system in a folder can be entered here, or ""."""
    if os.geteuid() != 0:
        return "a system in a folder is made and entered by root only"
    missing = [name for name in ("unshare", "pivot_root") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}; on Debian: apt install util-linux"
    with tempfile.TemporaryDirectory(prefix="unipar-fresh-") as folder:
        script = 'mount -t proc proc "$0" && umount "$0" && mount --bind "$0" "$0" && mount --rbind /dev "$0"'
        words = [*NAMESPACES, "sh", "-c", script, folder]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            return "this kernel did not mount a folder within 30 s"
    return f"this machine refuses namespaces or mounts: {' '.join(done.stderr.split())}" if done.returncode else ""


def require_mmdebstrap() -> None:
    """Install mmdebstrap where it is missing; raise if it cannot be had."""
    if shutil.which("mmdebstrap") is None and shutil.which("apt-get") is not None:
        say("installing mmdebstrap")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "mmdebstrap"]):
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["apt-get", *words], env=environment, capture_output=True, timeout=180, check=False)
    if shutil.which("mmdebstrap") is None:
        raise NoMachine("no mmdebstrap; on Debian: apt install mmdebstrap")


class BareMachine:
    """A minimal Debian in a folder. As a context manager: the folder is gone at the end."""

    def __init__(self, place: Path | None = None) -> None:
        if why := reason_no_namespaces():
            raise NoMachine(why)
        place = (place or Path(tempfile.gettempdir())).resolve()
        if (free := shutil.disk_usage(place).free) < DISK_BYTES:
            raise NoMachine(f"it takes {DISK_BYTES / 1e9:.0f} GB, and {place} has {free / 1e9:.1f} GB free")
        self.folder = Path(tempfile.mkdtemp(prefix="unipar-fresh-", dir=place))
        self.folder.chmod(0o755)  # the ordinary user passes
        self.system = self.folder / "system"
        self.read_only: list[Path] = []
        """Folders of this machine that are there, too."""

    def __enter__(self) -> BareMachine:
        return self

    def __exit__(self, *_: object) -> None:
        left = mounted_below(self.folder, Path("/proc/self/mountinfo").read_text("utf-8"))
        if left:  # all mounts are in namespaces of processes that have ended: somebody else's
            say(f"{self.folder} stays, as {', '.join(left)} is mounted in it")
            return
        say(f"removing {self.folder}")
        subprocess.run(["rm", "-rf", "--one-file-system", self.folder], check=False)

    def make(self, packages: Sequence[str], suite: str = SUITE) -> None:
        """Make the system with these packages, its ordinary user, and this machine's settings of pip."""
        require_mmdebstrap()
        files: list[str] = []
        for n, text in enumerate(apt_sources(debian_release(), suite)):
            file = self.folder / f"{n}.{'sources' if 'URIs:' in text else 'list'}"
            file.write_text(text, "utf-8")
            files.append(str(file))
        if not files:
            raise NoMachine("this machine has no sources of Debian in /etc/apt, from which the system would be made")
        options = self.folder / "apt.conf"
        known = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
        wanted = [line for line in known.splitlines() if re.match(r"Acquire::(Check-|https?::|Retries|Force)", line)]
        options.write_text("\n".join([*wanted, ""]), "utf-8")
        say(f"Debian {suite} with {' '.join(packages)}, in {self.system}")
        command = ["mmdebstrap", "--variant=minbase", f"--aptopt={options}"]
        command += [f"--include={','.join([*packages, *ALWAYS])}", suite, str(self.system), *files]
        self._make(command)
        subprocess.run(["chroot", self.system, "useradd", "--create-home", "--shell", "/bin/bash", "user"], check=True)
        self._take_settings()
        if code := self.run("root", "true").code:
            raise NoMachine(f"the system cannot be entered: exit {code}, see above")

    def _make(self, command: Sequence[str]) -> None:
        lines: list[str] = []
        with _started([*NAMESPACES, "--mount-proc", *command]) as making:
            limit = threading.Timer(MAKING_LIMIT, _end, [making])
            limit.start()
            try:
                lines += _shown(making)
                code = making.wait()
            finally:
                limit.cancel()
        if code == -signal.SIGKILL:
            raise NoMachine(f"mmdebstrap was ended after {MAKING_LIMIT:.0f} s")
        if code:
            raise NoMachine(f"mmdebstrap failed with {code}: {' | '.join(lines[-3:])}")

    def _take_settings(self) -> None:
        own = [(Path.home() / path, path) for path in OWN_PIP_FILES if (Path.home() / path).is_file()]
        common = [path for path in PIP_FILES if path.is_file()]
        settings = [*common, *(file for file, _ in own)]
        for file in NETWORK_FILES:
            self._put(file, file)
        for file, path in own:
            for home in HOMES.values():
                self._put(file, home / path)
        texts = [file.read_text("utf-8") for file in settings] + list(variables_passed_on().values())
        needed = {Path(path) for text in texts for path in named_paths(text)}
        for file in (*common, *needed):
            self._put(file, file)
        self.read_only = outermost(path for path in needed if path.is_dir())
        if named := [*settings, *self.read_only]:
            say(f"this machine's {', '.join(map(str, named))} are there, too")

    def _put(self, file: Path, path: Path) -> None:
        if file.is_file():
            target = self.system / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)

    def clone(self, user: str) -> str:
        """Clone the checkout's last commit into a user's home; return its path there."""
        path = f"{HOMES[user]}/unipar"
        # Only a file of settings, and no option, says that another user's checkout may be read.
        settings = self.folder / ".gitconfig"
        settings.write_text("[safe]\n\tdirectory = *\n", "utf-8")
        command = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), f"{self.system}{path}"]
        subprocess.run(command, env={**os.environ, "GIT_CONFIG_GLOBAL": str(settings)}, check=True)
        subprocess.run(["chroot", self.system, "chown", "-R", f"{user}:", HOMES[user]], check=True)
        return path

    def run(self, user: str, command: str, at: str = "/", share: Sequence[Path] = ()) -> Result:
        """Run a command as this user; what it prints is shown."""
        folders = [word for path in self.read_only for word in ("ro", str(path))]
        folders += [word for path in share for word in ("rw", str(path))]
        variables = variables_passed_on() | {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": HOMES[user],
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }
        words = [f"{name}={value}" for name, value in variables.items()]
        if user != "root":
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        began, network, tests = time.monotonic(), False, False
        entering = [*NAMESPACES, "sh", "-c", ENTER, "sh", str(self.system), f"cd {at} && {command}"]
        with _started([*entering, *folders, "--", *words]) as machine:
            for line in _shown(machine):
                network = network or NETWORK_FAILS.search(line) is not None
                tests = tests or "test session starts" in line
            code = machine.wait()
        return Result(user, command, code, time.monotonic() - began, network=code != 0 and network and not tests)


@contextmanager
def _started(command: Sequence[str]) -> Generator[subprocess.Popen[bytes]]:
    """Context manager: a process in namespaces, of which nothing is left at the end; Ctrl-C is for this one alone."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            _end(process)


def _shown(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield each line that a process prints, when it has been shown."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
        yield line.decode(errors="replace").rstrip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the first process of a machine, if it runs, and with it all others."""
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with suppress(OSError):  # it ended meanwhile
            for pid in map(int, children.read_text("ascii").split()):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)


def play(machine: BareMachine, users: Sequence[str], commands: Sequence[str], share: Sequence[Path]) -> list[Result]:
    """Run the commands as each of the users; after one that failed, a user's others are left out."""
    results: list[Result] = []
    for user in users:
        at = machine.clone(user)
        for command in commands:
            say(f"{user}: {command}")
            results.append(machine.run(user, command, at, share))
            if results[-1].code:
                break
    return results


def report(results: Sequence[Result]) -> str:
    """Return a line for each command."""
    width = max(len(one.command) for one in results)
    lines: list[str] = []
    for one in results:
        failed = "failed: pip did not reach the index" if one.network else f"failed ({one.code})"
        minutes, seconds = divmod(round(one.seconds), 60)
        outcome = failed if one.code else "succeeded"
        lines.append(f"{one.user:<4}  {one.command:<{width}}  {minutes:2} min {seconds:02} s  {outcome}")
    return "\n".join(lines)


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 if all commands succeeded, 3 if the network is all that failed, else 1."""
    failures = [one for one in results if one.code]
    return NO_MACHINE if failures and all(one.network for one in failures) else int(bool(failures))


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None) -> int:
    readme = (ROOT / "README.md").read_text("utf-8")
    asked = argparse.ArgumentParser(
        prog="make fresh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--as", dest="users", action="append", choices=list(HOMES), help="as this user; default: both")
    asked.add_argument("--only", metavar="WORD", default="", help="those of README's commands that have this word")
    asked.add_argument("--command", action="append", help="instead of README's; repeat it for more")
    asked.add_argument("--debian", metavar="RELEASE", default=SUITE, help=f"default: {SUITE}")
    asked.add_argument("--share", metavar="FOLDER", type=Path, action="append", default=[], help="is there, too")
    asked.add_argument("--place", metavar="FOLDER", type=Path, help="where the system is put; default: TMPDIR")
    chosen = asked.parse_args(words)
    commands = chosen.command or [one for one in readme_commands(readme) if chosen.only in one]
    if not commands:
        asked.error(f"--only: README has {', '.join(readme_commands(readme))}")
    earlier = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with BareMachine(chosen.place) as machine:
            machine.make(readme_packages(readme), chosen.debian)
            results = play(machine, chosen.users or list(HOMES), commands, chosen.share)
    except (NoMachine, OSError, subprocess.CalledProcessError) as e:
        say(f"no bare machine can be made here: {e}")
        return NO_MACHINE
    except KeyboardInterrupt:
        say("stopped")
        return 130
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    print(report(results))
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
