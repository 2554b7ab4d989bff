"""`python -m batchgen`."""

from batchgen.cli import main

main()
