"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.utils.files import whole, write_file_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """While it is written, readers have the old one; afterwards nothing lies beside it."""
    file = tmp_path / "a.json"
    write_file_atomically(file, "old")
    with whole(file) as partial:
        partial.write_text("new", "utf-8")
        assert file.read_text("utf-8") == "old"
    assert file.read_text("utf-8") == "new"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_was_there_stays(error: type[BaseException], tmp_path: Path) -> None:
    """Whatever ends the writing: no half of a file, under any name."""
    file = tmp_path / "a.json"
    write_file_atomically(file, "old")
    with pytest.raises(error), whole(file) as partial:  # noqa: PT012 - it fails half-way
        partial.write_text("ne", "utf-8")
        raise error
    assert file.read_text("utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    """And not the one beside it."""
    file = tmp_path / "none" / "a.json"
    with pytest.raises(FileNotFoundError) as e:
        write_file_atomically(file, "text")
    assert e.value.filename == str(file)
