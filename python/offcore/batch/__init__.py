"""Batches of copies between any memories of one process."""

from offcore.batch.copy import BatchHandle, BatchPolicy, batch_copy, batch_program
from offcore.batch.result import BatchResult

__all__ = ["BatchHandle", "BatchPolicy", "BatchResult", "batch_copy", "batch_program"]
