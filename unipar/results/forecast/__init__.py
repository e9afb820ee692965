"""Forecast of a comparison: what planning predicted for its cells, and how it compares with what was measured."""
