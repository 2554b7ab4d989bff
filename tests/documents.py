"""What is written for people: the README and the pages that it points to."""

from __future__ import annotations

from tests import runs

NAMES = ("README.md", "jobs/README.md", "manifests/README.md", "batchgen/bench/README.md", "slurm/README.md")
PAGES = {name: (runs.ROOT / name).read_text(encoding="utf-8") for name in NAMES}
README = PAGES["README.md"]
ALL = "\n".join(PAGES.values())
