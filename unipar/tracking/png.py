"""PNG files: written from bytes of pixels, and their size."""

from __future__ import annotations

import struct
import zlib

COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG's number for grey, grey and alpha, RGB, and RGB and alpha, by their channels."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(pixels: bytes, shape: tuple[int, int, int]) -> bytes:
    """Return an image of height x width x channels, a byte each, as the bytes of a PNG file."""
    height, width, channels = shape
    length = width * channels
    rows = b"".join(b"\0" + pixels[i * length : (i + 1) * length] for i in range(height))  # 0: the row has no filter
    head = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def png_size(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
