"""The run folder, the only channel from a run's processes to its readers: paths, ledger, heartbeat, errors, lock."""
