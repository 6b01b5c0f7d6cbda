"""See `spindel.testing.simulation`."""

import sys

from spindel.testing.simulation._command import main

if __name__ == "__main__":
    sys.exit(main())
