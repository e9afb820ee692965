"""`make route`: the walk of a config leads up and back no more often than it did when these limits were set."""

from __future__ import annotations

import pytest

from tools.route import VERBS, walk_of

LIMITS = {"launch": (1, 13), "compare": (1, 32)}
"""Most climbs and returns by verb. Before configs were settled in one place they were 4 and 27, 5 and 64."""


@pytest.mark.parametrize("verb", VERBS)
def test_climbs_and_returns(verb: str) -> None:
    """A launch, and a comparison of two strategies; the walk begins where the config is validated, and has a room."""
    walk = walk_of(verb)
    climbs, returns = LIMITS[verb]
    assert (len(walk.climbs) <= climbs, walk.returns <= returns) == (True, True), (walk.climbs, walk.returns)
    assert walk.calls[0].called == "unipar/config/config.py:Config._evaluates_one_model"
    assert walk.rooms > 3
