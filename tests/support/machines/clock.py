"""A wrong clock on one machine, by a library in front of the C library's.

The kernel has one clock of the day for all its namespaces, so the programs are deceived: clock_gettime, gettimeofday
and time answer with seconds added, in every process that the variables reach. What the kernel itself stamps (file
times) is right, and a wait until a time of day ends late by as much; waits for a duration are not touched.
"""

from __future__ import annotations

import subprocess

from tests.support.machines.machine import Machine
from tests.support.programs import reason_no_programs

_LIBRARY = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, which, now);
    if (code == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += OFF;
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    int code = syscall(SYS_gettimeofday, now, zone);
    if (code == 0 && now) now->tv_sec += OFF;
    return code;
}

time_t time(time_t *also) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (also) *also = now.tv_sec;
    return now.tv_sec;
}
"""


def reason_no_wrong_clock() -> str:
    """Why no machine can have a wrong clock here; empty: it can."""
    return reason_no_programs("cc")


def wrong_clock(machine: Machine, seconds: int) -> dict[str, str]:
    """Return the variables under which programs on this machine see a clock that is ahead by so many seconds."""
    source, library = machine.path("/tmp/clock.c"), machine.path("/tmp/clock.so")
    source.write_text(_LIBRARY, "utf-8")
    words = ["cc", "-shared", "-fPIC", "-O1", f"-DOFF={seconds}", "-o", str(library), str(source)]
    subprocess.run(words, check=True)
    return {"LD_PRELOAD": "/tmp/clock.so"}
