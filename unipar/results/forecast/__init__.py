"""Forecast of a comparison: what planning predicted for its strategies, and how it compares with what was measured."""
