"""Pipeline of the mesh: stages, the channel between them, schedules."""
