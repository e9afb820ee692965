"""Messages between an agent and the processes that stand for its workers: a line of JSON, and bytes that follow it."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, final

_HEAD = struct.Struct("<II")
_MOST_BYTES = 2**31


@final
class FramedConnection:
    """Connection over which messages go whole."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any], content: bytes = b"") -> None:
        """Send a message, with some bytes."""
        head = json.dumps(message).encode()
        self._connection.sendall(_HEAD.pack(len(head), len(content)) + head + content)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message and its bytes; raise ConnectionError if the other end is gone."""
        head, content = _HEAD.unpack(self._read(_HEAD.size))
        if max(head, content) > _MOST_BYTES:
            raise ConnectionError("what came is no message")
        return json.loads(self._read(head)), self._read(content)

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._connection.recv(min(size, 2**20))
            if not part:
                raise ConnectionResetError("the other end has closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._connection.close()
