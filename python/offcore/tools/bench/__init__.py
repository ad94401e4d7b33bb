"""Collectives measured: a process a rank, beside NCCL and other baselines."""
