"""Trackers of metrics besides the run folder: TensorBoard, Weights & Biases, MLflow, plugins."""
