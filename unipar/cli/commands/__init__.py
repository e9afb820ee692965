"""Commands of `unipar`. A command imports unipar's parts when it is called, so that `unipar --help` is quick."""
