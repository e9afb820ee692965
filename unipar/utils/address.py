"""Addresses of what is not in a folder of this machine, such as `s3://bucket/path`; only their text is known here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

from typing_extensions import override

_BEGINNING = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/]*:[^/]*@")


@final
@dataclass(frozen=True)
class Address:
    """Address of a folder or file, which reads like a path: `address / "name"`, `.name`, `.parent`."""

    text: str
    """Without a slash at the end."""

    @property
    def protocol(self) -> str:
        """Word before `://`."""
        return self.text.partition("://")[0]

    @property
    def name(self) -> str:
        """Last part."""
        return self.text.partition("://")[2].rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """Address without its last part; of a first part, itself."""
        protocol, _, path = self.text.partition("://")
        above = path.rpartition("/")[0]
        return Address(f"{protocol}://{above}") if above.strip("/") else self

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.text}/{name}")

    @override
    def __str__(self) -> str:
        return self.text


Location = Path | Address
"""Folder or file of this machine, or the address of one elsewhere."""


def is_address(text: str) -> bool:
    """Return whether a text is an address and not a path."""
    return _BEGINNING.match(text) is not None


def parse_address(text: str) -> Address:
    """Return the address of a text; raise ValueError if it holds a password or says more than a place."""
    shown = _PASSWORD.sub("://***@", text)
    if shown != text:
        raise ValueError(
            f"{shown} holds a password, which would be written to config files and logs: leave it out, and give it "
            "to the store's own library, in its environment variables or its file"
        )
    protocol, _, path = text.partition("://")
    if "::" in text:
        raise ValueError(f"{text} is several addresses in a chain; name one")
    if "?" in path or "#" in path:
        raise ValueError(f"{text.partition('?')[0].partition('#')[0]} is followed by ? or #; name a place alone")
    parts = path.strip("/").split("/")
    if not parts[0]:
        raise ValueError(f"{text} names no place; write an address such as s3://bucket/path")
    for part in parts:
        if part in ("", ".", ".."):
            raise ValueError(f"{text} has the part {part!r}; write the place out")
    return Address(f"{protocol.lower()}://{path.rstrip('/')}")


def parse_location(text: str) -> Location:
    """Return a text as a path or as an address; raise ValueError as `parse_address`."""
    return parse_address(text) if is_address(text) else Path(text)
