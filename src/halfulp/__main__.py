"""`python -m halfulp` is the command line."""

from halfulp.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
