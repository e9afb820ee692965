"""mkdocs for pyright, as far as docs/site_pages.py uses it: `make test` does without what only the docs need."""
