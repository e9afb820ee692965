"""Time that is not hidden: a thread's sleep, and kernels of NCCL beside others."""

from __future__ import annotations

import time

import pytest

from unipar.profiling.waiting import SleepClock, seconds_not_hidden


def test_a_thread_that_computes_does_not_wait() -> None:
    """A tenth of a second asleep counts, and a tenth of a second of processor time does not."""
    clock = SleepClock()
    clock.start()
    time.sleep(0.1)
    clock.stop()
    assert clock.seconds == pytest.approx(0.1, abs=0.05)
    asleep = clock.seconds
    clock.start()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    clock.stop()
    assert clock.seconds - asleep < 0.05
    clock.close()


def test_kernels_that_no_other_hides() -> None:
    """Of five seconds of sending, the two beside a product are hidden; without NCCL nothing is known."""
    product, sent = ("gemm", 1.0, 4.0), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2.0, 6.0)
    again = ("ncclDevKernel_AllGather_RING_LL", 5.0, 7.0)
    assert seconds_not_hidden([product, sent, again]) == 3.0
    assert seconds_not_hidden([sent, ("gemm", 0.0, 9.0)]) == 0.0
    assert seconds_not_hidden([product]) is None
