from typing import Self

from mkdocs.config.defaults import MkDocsConfig

class File:
    src_uri: str
    @classmethod
    def generated(cls, config: MkDocsConfig, src_uri: str, *, content: str | bytes | None = None) -> Self: ...

class Files:
    def append(self, file: File) -> None: ...
