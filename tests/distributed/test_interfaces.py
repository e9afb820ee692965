"""Network interfaces: largest packet, speed."""

from __future__ import annotations

from unipar.distributed.interfaces import mtu_of_interface, speed_of_interface


def test_loopback() -> None:
    """The loopback has a largest packet, and no speed."""
    assert mtu_of_interface("lo") == 65536
    assert speed_of_interface("lo") is None


def test_an_interface_that_is_not_there() -> None:
    """Neither is known."""
    assert mtu_of_interface("none0") is None
    assert speed_of_interface("none0") is None
