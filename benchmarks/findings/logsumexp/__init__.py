"""Log-sum-exp, an operation that is not halfulp's own: four files, as docs/operations.md shows."""
