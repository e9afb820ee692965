"""Trackers, to which metrics are written besides the run folder: TensorBoard, Weights & Biases, MLflow, plugins."""
