"""`Patches`: functions of libraries with something before and after them, all of which can be put back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, final

_MISSING: Any = object()


@final
class Patches:
    """Attributes that were replaced, and handles of hooks that were registered."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []

    def around(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call `before(*args)` and `after(result, *args)` around `owner.name`; do nothing if there is none."""
        real = getattr(owner, name, None)
        if real is None:
            return

        @wraps(real)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = real(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, observed)

    def keep(self, handle: Any) -> None:
        """Keep the handle of a hook, to remove the hook in `undo`."""
        self._handles.append(handle)

    def undo(self) -> None:
        """Put everything back; what somebody else has replaced since stays theirs, and calls through."""
        for owner, name, real in reversed(self._replaced):
            if real is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, real)
        self._replaced.clear()
        while self._handles:
            self._handles.pop().remove()
