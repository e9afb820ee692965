"""Engine of one mesh: pipeline, tensor and context parallelism, with FSDP2 over the ranks that are left."""
