"""Figures of `unipar observe`: its account beside that of a comparison, and what it costs."""
