"""`unipar export` and `unipar import`: to and from other libraries' scripts and configs."""
