"""Commands on a config alone, which start no process: `check`, `explain`, `plan`, `schema`."""
