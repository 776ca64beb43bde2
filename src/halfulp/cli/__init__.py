"""The command line: parse, call, print. What is computed lies below.

`dispatch` finds the command; `audits`, `experiments` and `lab` hold the commands, `shell` what they
share.
"""

from halfulp.cli.dispatch import COMMANDS, main

__all__ = ["COMMANDS", "main"]
