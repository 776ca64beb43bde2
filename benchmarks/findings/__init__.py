"""What the audit finds in kernels that people use (docs/findings.md)."""
