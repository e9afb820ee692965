"""Graphs that torch compiles in this process: their number, graph breaks and recompiles, each with its reason."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any, Final, final

from unipar.profiling.work import CompiledWork

_KEPT: Final = 4096
"""Number of compilations that torch remembers until they are read."""


@final
class CompileCounts:
    """Counts of what torch's compiler did since this object was made."""

    def __init__(self) -> None:
        self._breaks: Counter[str] = Counter()
        self._recompiles: Counter[str] = Counter()
        self._graphs = 0
        self._last: Any = None
        self._paused = False
        import torch._dynamo.utils as dynamo

        dynamo.set_compilation_metrics_limit(_KEPT)
        self.resume()

    def pause(self) -> None:
        """Count nothing until `resume`: recording memory makes torch compile once more."""
        self._add()
        self._paused = True

    def resume(self) -> None:
        """Begin to count, or count again."""
        self._paused = False
        self._breaks_before, self._graphs_before = self._logged_breaks(), graphs_compiled()
        self._new_recompiles()

    def read(self) -> CompiledWork:
        """Return the counts so far."""
        self._add()
        return CompiledWork(graphs=self._graphs, breaks=dict(self._breaks), recompiles=dict(self._recompiles))

    def _add(self) -> None:
        """Add what was told since the last call."""
        if self._paused:
            return
        breaks, graphs = self._logged_breaks(), graphs_compiled()
        self._breaks.update(breaks - self._breaks_before)
        self._graphs += graphs - self._graphs_before
        self._breaks_before, self._graphs_before = breaks, graphs
        self._recompiles.update(self._new_recompiles())

    @staticmethod
    def _logged_breaks() -> Counter[str]:
        import torch._dynamo.utils as dynamo

        breaks: Counter[str] = Counter()
        for why, count in dynamo.counters["graph_break"].items():
            breaks[describe_break(str(why))] += count
        return breaks

    def _new_recompiles(self) -> list[str]:
        """Return the reason of each recompile that was not read before."""
        import torch._dynamo.utils as dynamo

        metrics = dynamo.get_compilation_metrics()
        first = next((i for i in range(len(metrics) - 1, -1, -1) if metrics[i] is self._last), -1) + 1
        self._last = metrics[-1] if metrics else None
        return [describe_recompile(one.recompile_reason) for one in metrics[first:] if one.recompile_reason]


def graphs_compiled() -> int:
    """Return how many graphs this process has compiled."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def describe_break(log_text: str) -> str:
    """Return a graph break's reason in one line: torch's first line, and what it was about."""
    lines = [line.strip() for line in log_text.splitlines() if line.strip()]
    about = next((line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context:")), "")
    return f"{lines[0]} ({about})" if about else lines[0] if lines else "no reason given"


def describe_recompile(log_text: str) -> str:
    """Return a recompile's reason in one line, without the number of the graph that did not fit."""
    first = re.sub(r"^\d+/\d+: ", "", log_text.strip())
    return first.splitlines()[0].strip() if first else "no reason given"
