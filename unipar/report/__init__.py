"""HTML pages: `data/` reads result folders, `charts/` draws SVG figures, `pages/` assembles both into pages."""
