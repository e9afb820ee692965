from typing import Any

class MkDocsConfig:
    site_name: str
    repo_url: str | None
    repo_name: str | None
    edit_uri: str | None
    nav: list[Any] | None
