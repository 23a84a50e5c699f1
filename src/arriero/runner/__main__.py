"""`python -m arriero.runner <configuration>`: one runner process."""

from __future__ import annotations

import sys

from arriero.runner.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
