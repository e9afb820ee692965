"""The run folder, the only channel between a run's processes and whoever reads it: paths, ledger, heartbeat, error files, ownership."""
