"""transformers for pyright: its own `__init__` has hundreds of wildcard imports, which take half a minute to bind."""

# pyright: reportIncompleteStub=false

from typing import Any

def __getattr__(name: str) -> Any: ...
