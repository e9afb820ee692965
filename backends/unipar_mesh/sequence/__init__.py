"""Sequence parallelism inside `parallel.tensor`: what lies between cut matrices and between blocks is split as well."""
