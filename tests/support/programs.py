"""Programs that tests start and README's packages do not bring: which are missing here, and the mark that says so."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "cc": "gcc",
    "chromium": "chromium",
    "ip": "iproute2",
    "mount": "mount",
    "mpirun": "openmpi-bin",
    "munged": "munge",
    "nft": "nftables",
    "nsenter": "util-linux",
    "pdftotext": "poppler-utils",
    "pdsh": "pdsh",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "strace": "strace",
    "tc": "iproute2",
    "unshare": "util-linux",
}
"""Debian's package of each program."""


def find_program(name: str) -> str | None:
    """Return the file of a program on PATH or among those of the system's administrator."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def reason_no_programs(*names: str) -> str:
    """Return which of these programs are missing, and how to get them, or ""."""
    missing = [name for name in names if find_program(name) is None]
    packages = dict.fromkeys(PACKAGES[name] for name in missing)
    return f"no {', '.join(missing)}; on Debian: apt-get install {' '.join(packages)}" if missing else ""


def skip_because(reason: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test for this reason; with "" it is played."""
    return pytest.mark.skipif(bool(reason), reason=reason)


def needs_programs(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test that starts these programs."""
    return skip_because(reason_no_programs(*names))
