"""Closed forms of ZeRO's stages: what a rank holds in a step, and what it sends."""
