"""HTML pages: `data/` reads a folder for a page, `charts/` draws SVG, `pages/` puts them together."""
