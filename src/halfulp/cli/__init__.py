"""The command line: parse, call, print. What is computed lies below.

`entry` finds the command, in `audit_command`, `bench_command`, `report_command`, `doctor`,
`experiments` or `lab`; `shell` is what they share, `usage` what is said of a line that is wrong.
"""

from halfulp.cli.entry import COMMANDS, main

__all__ = ["COMMANDS", "main"]
