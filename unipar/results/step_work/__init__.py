"""Figures on the work of a step: throughput, operations, waiting, graph breaks; computed, and as a text table."""
