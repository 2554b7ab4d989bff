"""What can go wrong, by who has to act on it.

Every message finishes the sentence: where, what was found, what is allowed, what to do. The command line
turns each class into its exit code and never shows a traceback for the first two.
"""

from __future__ import annotations


class BatchgenError(Exception):
    """Base of all errors that batchgen raises on purpose."""

    exit_code = 1


class UsageError(BatchgenError):
    """The command, the job file, the manifest, the model folder or the run directory is not usable as given."""

    exit_code = 2


class Interrupted(BatchgenError):
    """The run stopped early and the same command resumes it: a full disk, a lost mount, a signal."""

    exit_code = 75


class RowError(BatchgenError):
    """One row could not be made; its neighbours are not concerned."""
