"""Ways to damage the files of a checkpoint, each of which a reader must refuse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from tests.support.checkpoint_copies import FILES, PAYLOAD, SHARDS, Mutated


def _flip(m: Mutated) -> None:
    name = m.any_file()
    data = bytearray(m.read(name))
    data[m.draw.randrange(len(data))] ^= 1 << m.draw.randrange(8)
    m.write(name, bytes(data))


def _truncate(m: Mutated) -> None:
    name = m.any_file()
    data = m.read(name)
    m.write(name, data[: m.draw.randrange(len(data))])


def _lengthen(m: Mutated) -> None:
    name = m.any_file()
    m.write(name, m.read(name) + m.draw.randbytes(m.draw.randint(1, 40)))


def _overwrite(m: Mutated) -> None:
    """Some bytes become others: at least one changes."""
    name = m.any_file()
    data = bytearray(m.read(name))
    first = m.draw.randrange(len(data))
    count = min(m.draw.randint(1, 64), len(data) - first)
    data[first : first + count] = bytes(b ^ m.draw.randint(1, 255) for b in data[first : first + count])
    m.write(name, bytes(data))


def _delete(m: Mutated) -> None:
    (m.path / m.any_file()).unlink()


def _delete_shards(m: Mutated) -> None:
    shutil.rmtree(m.path / "shards")


def _swap(m: Mutated) -> None:
    one, two = m.draw.sample(FILES, 2)
    first, second = m.read(one), m.read(two)
    m.write(one, second)
    m.write(two, first)


def _stale(m: Mutated) -> None:
    name = m.any_file()
    m.write(name, (m.other / name).read_bytes())


def _stale_pair(m: Mutated) -> None:
    for name in ("manifest.json", "manifest.sha256"):
        m.write(name, (m.other / name).read_bytes())


def _renamed(m: Mutated) -> None:
    name = m.any_file()
    (m.path / name).rename(m.path / f"{name}{m.draw.randrange(10)}")


def _extra(m: Mutated) -> None:
    name = m.draw.choice(
        ("notes.txt", ".metadata", "data.pkl", "shards/rank-00002.safetensors", "shards/.hidden", "state.json~")
    )
    m.write(name, m.draw.choice((b"", PAYLOAD, m.read(SHARDS[0]))))


def _extra_folder(m: Mutated) -> None:
    (m.path / m.draw.choice(("more", "shards/more", ".git"))).mkdir()


def _symlink(m: Mutated) -> None:
    """The same bytes, but in another place."""
    name = m.any_file()
    outside = m.path.parent / "outside"
    (m.path / name).rename(outside)
    (m.path / name).symlink_to(outside)


def _symlinked_folder(m: Mutated) -> None:
    outside = m.path.parent / "outside-shards"
    (m.path / "shards").rename(outside)
    (m.path / "shards").symlink_to(outside)


def _symlinked_checkpoint(m: Mutated) -> None:
    real = m.path.parent / "real"
    m.path.rename(real)
    m.path.symlink_to(real)


def _dangling(m: Mutated) -> None:
    name = m.any_file()
    (m.path / name).unlink()
    (m.path / name).symlink_to("/nowhere/at/all")


def _hard_link(m: Mutated) -> None:
    os.link(m.path / m.any_file(), m.path.parent / "second-name")


def _fifo(m: Mutated) -> None:
    name = m.any_file()
    (m.path / name).unlink()
    os.mkfifo(m.path / name)


def _device(m: Mutated) -> None:
    """A folder instead of a file."""
    name = m.any_file()
    (m.path / name).unlink()
    (m.path / name).mkdir()


def _pickled(m: Mutated) -> None:
    """Pickle in place of a file, with its hash in the manifest."""
    name = m.draw.choice(("state.json", *SHARDS))
    m.forge(name, PAYLOAD)


DAMAGE: tuple[Callable[[Mutated], None], ...] = (
    _flip,
    _truncate,
    _lengthen,
    _overwrite,
    _delete,
    _delete_shards,
    _swap,
    _stale,
    _stale_pair,
    _renamed,
    _extra,
    _extra_folder,
    _symlink,
    _symlinked_folder,
    _symlinked_checkpoint,
    _dangling,
    _hard_link,
    _fifo,
    _device,
    _pickled,
)
"""All of them."""
