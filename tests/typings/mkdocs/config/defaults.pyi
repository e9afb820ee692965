from typing import Any

class MkDocsConfig:
    nav: list[Any] | None
