"""Timeline of a step of two modules, for closed forms by hand."""

from __future__ import annotations

from unipar.prediction.timeline import Moment, PredictedModule, PredictedParameter, StepTimeline

MOMENTS = (
    Moment("forward", "begin"),
    *(Moment("forward", what, module=n) for n in range(2) for what in ("call", "return")),
    Moment("backward", "begin"),
    *(Moment("backward", "arrive", module=1), Moment("backward", "gradient", parameter=1)),
    *(Moment("backward", "taken", parameter=1), Moment("backward", "arrive", module=0)),
    *(Moment("backward", "gradient", parameter=0), Moment("backward", "taken", parameter=0)),
    *(Moment("backward", "finish"), Moment("update", "begin"), Moment("steady", "begin")),
)
"""Two modules, one after the other, each with a parameter."""

TIMELINE = StepTimeline(
    (
        PredictedParameter("a", (150_001,), 4, True, states=(4, 4), viewed=True),
        PredictedParameter("b", (50_000,), 4, True, states=(4, 4)),
    ),
    {},
    (),
    MOMENTS,
    modules=(PredictedModule("first", (0,)), PredictedModule("last", (1,))),
)
"""200,001 parameters in all: ZeRO's buckets have 65,536 elements, which the first parameter exceeds."""
