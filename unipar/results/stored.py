"""`StoredResult`: base of the results that files hold, and the refusal of files that hold none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from unipar.errors import ReportError


class StoredResult(BaseModel):
    """Base of results that files hold: frozen; keys that only readers of the file need are left out when it is read.

    `model_dump(mode="json")` returns what files hold.
    """

    model_config = ConfigDict(
        defer_build=True,
        frozen=True,
        extra="ignore",
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """Return the result in a file's mapping, in which JSON has made lists of tuples."""
        return cls.model_validate(data, strict=False)

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values of some fields. The values are not validated."""
        assert values.keys() <= type(self).model_fields.keys(), values.keys()
        return self.model_copy(update=values)


StoredResultT = TypeVar("StoredResultT", bound=StoredResult)


def parse_result(result: type[StoredResultT], file: Path, data: Mapping[str, Any], what: str) -> StoredResultT:
    """Return the result in a file's mapping; raise ReportError, which says that it is not `what`, if there is none."""
    try:
        return result.read(data)
    except (LookupError, TypeError, AttributeError, ValidationError) as e:
        why = _first_error(e) if isinstance(e, ValidationError) else f"no key {e}" if isinstance(e, LookupError) else e
        raise not_written_by_unipar(file, what, why) from None


def not_written_by_unipar(file: Path, what: str, why: object) -> ReportError:
    """Return the error that a file is not `what` its name says, for this reason."""
    return ReportError(f"{file} is not {what} written by unipar: {why}; run the command again with --overwrite")


def _first_error(error: ValidationError) -> str:
    """Return the key that is missing, what a validator says, or else the number of errors."""
    first = error.errors()[0]
    if first["type"] == "missing":
        return f"no key {first['loc'][-1]!r}"
    return str(first.get("ctx", {}).get("error", error)).partition("\n")[0]
