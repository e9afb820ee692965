"""Addresses: what they are made of, and what is refused before anything is asked of a store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unipar.utils.address import Address, is_address, parse_address, parse_location


def test_an_address_reads_like_a_path() -> None:
    """Its parts, and what lies below and above it."""
    address = parse_address("S3://bucket/some/path/")
    assert str(address) == "s3://bucket/some/path"
    assert (address.protocol, address.name, address.parent) == ("s3", "path", Address("s3://bucket/some"))
    assert str(address / "step-00000001" / "state.json") == "s3://bucket/some/path/step-00000001/state.json"
    assert Address("s3://bucket").parent == Address("s3://bucket")
    assert str(parse_address("file:///tmp/x").parent) == "file:///tmp"


def test_what_is_an_address_and_what_a_path() -> None:
    """A protocol before `://` makes the difference."""
    assert [is_address(text) for text in ("s3://b", "memory://b", "/a/b", "a:b", "auto", "C:/x")] == [True] * 2 + [
        False
    ] * 4
    assert parse_location("runs/a") == Path("runs/a")
    assert parse_location("gs://a/b") == Address("gs://a/b")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "sftp://me:hunter2@host/path",
            "sftp://***@host/path holds a password, which would be written to config files and logs: leave it out, and "
            "give it to the store's own library, in its environment variables or its file",
        ),
        ("s3://", "s3:// names no place; write an address such as s3://bucket/path"),
        ("s3:///", "s3:/// names no place; write an address such as s3://bucket/path"),
        ("s3://a/../b", "s3://a/../b has the part '..'; write the place out"),
        ("s3://a//b", "s3://a//b has the part ''; write the place out"),
        ("s3://a/b?X-Amz-Signature=hunter2", "s3://a/b is followed by ? or #; name a place alone"),
        ("simplecache::s3://a", "simplecache::s3://a is several addresses in a chain; name one"),
    ],
)
def test_what_is_refused(text: str, sentence: str) -> None:
    """Secrets are not repeated."""
    assert is_address(text)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$") as refused:
        parse_address(text)
    assert "hunter2" not in str(refused.value)
