"""`python -m spindel`."""

from __future__ import annotations

from spindel.cli import main

if __name__ == "__main__":
    main()
