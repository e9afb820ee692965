"""Device lines that no test executes, and why."""

from __future__ import annotations

from collections.abc import Mapping

EXCEPTIONS: Mapping[str, Mapping[str, str]] = {}
"""Reasons by the file and the beginning of a statement or an arm."""
