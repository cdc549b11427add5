"""The fixtures of `tests.journal`: journals to report on."""

from tests.journal.conftest import run_job

__all__ = ["run_job"]
