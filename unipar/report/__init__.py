"""HTML pages: `data/` reads results, `charts/` draws SVG figures, `html/` has elements, `pages/` assembles pages."""
