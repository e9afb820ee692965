"""The run folder, through which processes of a run communicate: paths, run log, heartbeat, error files."""
