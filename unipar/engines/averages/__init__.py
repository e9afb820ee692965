"""Moving averages of weights: their arithmetic, and the engine that keeps them beside any other engine."""
