"""How `unipar verify` proves that backends agree: runs that are watched, references to hold them to, and a verdict."""
