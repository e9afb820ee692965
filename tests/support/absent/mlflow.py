"""MLflow as if it were not installed, for launches that do not track: DeepSpeed imports it, which takes 2 s."""

raise ImportError("absent from launches of tests")
