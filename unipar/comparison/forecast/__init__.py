"""Forecast of a comparison: its cells planned in a process of their own, after they were measured."""
