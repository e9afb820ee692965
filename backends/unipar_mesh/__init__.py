"""Models split over tensor, pipeline and context: for the backends that unipar splits models for."""
