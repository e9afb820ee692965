"""Messages over a connection: they come whole and in order, however the system cuts what is sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator

import pytest

from unipar.distributed.meeting.frames import FramedConnection

Pair = tuple[FramedConnection, FramedConnection]


@pytest.fixture
def pair() -> Generator[Pair]:
    here, there = socket.socketpair()
    with here, there:
        yield FramedConnection(here), FramedConnection(there)


def test_messages_that_come_together(pair: Pair) -> None:
    """The first is waited for; the others are had at once, as the system tells no more of them."""
    here, there = pair
    here.send({"a": 1})
    here.send({"b": 2}, b"two\nlines")
    here.send({"c": 3})
    assert there.receive() == ({"a": 1}, b"")
    assert list(there.messages()) == [({"b": 2}, b"two\nlines"), ({"c": 3}, b"")]
    here.send({"d": 4})
    assert list(there.receive_all()) == [({"d": 4}, b"")]
    assert here.sent == there.received == len('{"a": 1}\n{"b": 2, "bytes": 9}\ntwo\nlines{"c": 3}\n{"d": 4}\n')


def test_large_messages(pair: Pair) -> None:
    """Bytes beyond what the system takes at once; a long line is compressed."""
    here, there = pair
    content, text = bytes(range(256)) * 20_000, "x" * 100_000
    sender = threading.Thread(target=here.send, args=({"text": text}, content))
    sender.start()
    assert there.receive() == ({"text": text}, content)
    sender.join()
    assert here.sent < len(content) + 1_000


def test_a_byte_at_a_time(pair: Pair) -> None:
    """A message that is not there whole is none yet."""
    here, there = pair
    for byte in b'{"a": 1, "bytes": 2}\nxy':
        assert list(there.messages()) == []
        here.connection.sendall(bytes([byte]))
        there.read()
    assert list(there.messages()) == [({"a": 1}, b"xy")]


def test_a_stranger_that_says_too_much(pair: Pair) -> None:
    """More than is asked for, without an end of line, is refused before all of it is read."""
    here, there = pair
    here.connection.sendall(b"x" * 10_000)
    with pytest.raises(ConnectionError, match=r"^what came is no message$"):
        there.receive(200)


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1", b"5", b"[]", b'{"packed": "eA=="}', b'{"packed": 1}', b'{"bytes": []}']
)
def test_a_stranger_that_says_something_else(pair: Pair, line: bytes) -> None:
    """Whatever it is, it is an error of the connection."""
    here, there = pair
    here.connection.sendall(line + b"\n")
    with pytest.raises(ConnectionError, match=r"^what came is no message$"):
        there.receive()


def test_the_other_end_is_gone(pair: Pair) -> None:
    """In the midst of a message."""
    here, there = pair
    here.connection.sendall(b'{"a": ')
    here.close()
    with pytest.raises(ConnectionResetError, match=r"^the other end has closed the connection$"):
        there.receive()
