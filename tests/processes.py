"""Real processes with the imports done: an interpreter of its own costs a second of a core."""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["batchgen.runner", "batchgen.models.pattern"])
