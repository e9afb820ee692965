"""`FramedConnection`: a connection over which messages go: each is a line of JSON, and bytes that may follow it."""

from __future__ import annotations

import json
import socket
import threading
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

_LONG: Final = 2000
"""Bytes of a line from which on it is sent compressed."""

_NO_MESSAGE: Final = "what came is no message"
_MOST_BYTES: Final = 2**31
_AT_ONCE: Final = 2**20
_PROBES: Final = 4


class FramedConnection:
    """Connection over which messages go whole; any thread may send, and one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.sent = 0
        """Bytes of the messages that were sent."""

        self.received = 0
        """Bytes of the messages that have come."""

        self._unread = bytearray()
        self._writing = threading.Lock()

    def fileno(self) -> int:
        return self.connection.fileno()

    def set_patience(self, silence: float) -> None:
        """Have the system tell when the other end has not answered for `silence` seconds."""
        pause = max(1, int(silence / (_PROBES + 1)))
        with suppress(OSError):  # it is lost, which whoever reads it learns
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection.settimeout(None)

    def send(self, message: dict[str, Any], content: bytes = b"") -> None:
        """Send a message, with some bytes; raise OSError if the system does not take it."""
        line = json.dumps({**message, "bytes": len(content)} if content else message).encode()
        if len(line) > _LONG:
            line = json.dumps({"packed": b64encode(zlib.compress(line, 1)).decode()}).encode()
        frame = line + b"\n" + content
        with self._writing:
            self.connection.sendall(frame)
        self.sent += len(frame)

    def receive(self, most: int = _MOST_BYTES) -> tuple[dict[str, Any], bytes]:
        """Wait for the next message, and return it with its bytes.

        Raise ConnectionError if the other end is gone, or if more than `most` bytes are no message.
        """
        while (message := next(self.messages(), None)) is None:
            if len(self._unread) > most:
                raise ConnectionError(_NO_MESSAGE)
            if not self.read(most):
                raise ConnectionResetError("the other end has closed the connection")
        return message

    def receive_all(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Wait for the next message; yield it and those that have come with it, of which the system tells no more."""
        yield self.receive()
        yield from self.messages()

    def read(self, most: int = _AT_ONCE) -> bool:
        """Wait until something comes, and read it; return False if the other end has closed the connection."""
        part = self.connection.recv(min(most, _AT_ONCE))
        self._unread += part
        return bool(part)

    def messages(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield each message that was read whole, with its bytes; raise ConnectionError if a line is no message."""
        while (end := self._unread.find(b"\n")) >= 0:
            try:
                message: dict[str, Any] = json.loads(self._unread[:end])
                if "packed" in message:
                    message = json.loads(zlib.decompress(b64decode(message["packed"])))
                begin, size = end + 1, max(0, int(message.pop("bytes", 0)))
            except (ValueError, TypeError, AttributeError, zlib.error):
                raise ConnectionError(_NO_MESSAGE) from None
            if len(self._unread) < begin + size:
                return
            content = bytes(self._unread[begin : begin + size])
            del self._unread[: begin + size]
            self.received += begin + size
            yield message, content

    def close(self) -> None:
        self.connection.close()
