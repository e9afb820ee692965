"""Results of runs, comparisons, scalings and verifications, as data: JSON, CSV, verdicts, text tables."""
