"""Where metrics go besides the run folder: TensorBoard, Weights & Biases, MLflow, plugins."""
