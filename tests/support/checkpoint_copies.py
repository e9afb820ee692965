"""Copies of checkpoints that tests damage or forge."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from unipar.checkpoint.protocol.verifying import seal_of_manifest

SHARDS = ("shards/rank-00000.safetensors", "shards/rank-00001.safetensors")
FILES = ("manifest.json", "manifest.sha256", "state.json", *SHARDS)
PAYLOAD = b"cos\nsystem\n(S'touch payload-ran'\ntR."
"""Pickle that runs a command when it is loaded."""


@dataclass
class Mutated:
    """Copy of a checkpoint, to be changed; `other` is a whole one of the same run, to be left as it is."""

    path: Path
    other: Path
    draw: random.Random

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def any_file(self) -> str:
        return self.draw.choice(FILES)

    def any_shard(self) -> str:
        return self.draw.choice(SHARDS)

    def manifest(self) -> Any:
        return json.loads(self.read("manifest.json"))

    def seal(self, manifest: Any) -> None:
        """Write a manifest with its SHA-256, as a forger would."""
        self.seal_bytes(json.dumps(manifest).encode())

    def seal_bytes(self, data: bytes) -> None:
        self.write("manifest.json", data)
        self.write("manifest.sha256", seal_of_manifest(data))

    def forge(self, name: str, data: bytes) -> None:
        """Write a file, and the manifest with its new size and hash."""
        self.write(name, data)
        manifest = self.manifest()
        manifest["files"][name] = {"bytes": len(data), "xxh3_128": xxh3_128(data).hexdigest()}
        self.seal(manifest)

    def header(self, name: str) -> tuple[Any, bytes]:
        data = self.read(name)
        length = int.from_bytes(data[:8], "little")
        return json.loads(data[8 : 8 + length]), data[8 + length :]

    def forge_header(self, name: str, header: Any, body: bytes) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        self.forge(name, struct.pack("<Q", len(text)) + text + body)
