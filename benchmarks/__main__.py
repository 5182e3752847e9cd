"""``python -m benchmarks``, from the root of the repository."""

from __future__ import annotations

import sys

from dtensor.benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
