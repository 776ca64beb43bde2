"""The commands of the training lab; `COMMANDS` in `halfulp.cli.dispatch` names them."""

from __future__ import annotations
