"""Worker side of `verify`: runs that are recorded, inside each rank."""
