"""`Section`: base class of every section of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base class of a section of the config: frozen; unknown keys are refused."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other values under dotted keys, such as `train.clip`. The values are not validated."""
        own: dict[str, Any] = {}
        for key, value in changes.items():
            first, _, rest = key.partition(".")
            inner = own.get(first, getattr(self, first))
            own[first] = inner.changed({rest: value}) if rest else value
        return self.model_copy(update=own)
