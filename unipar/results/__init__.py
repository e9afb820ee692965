"""Results of runs, comparisons, scalings and verifications: JSON, CSV, verdicts, text tables."""
