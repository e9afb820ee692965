"""The run folder, through which processes of a run communicate: paths, ledger, heartbeat, error files."""
