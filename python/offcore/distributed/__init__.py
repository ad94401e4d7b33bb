"""torch.distributed over copy engines: the backend "offcore", for tensors on CPUs and GPUs.

    import offcore.distributed                      # registers it; torch 2.14 needs no import
    dist.init_process_group("offcore")

All collectives are offcore's own where all ranks of a group are on one host and, on GPUs, reach
each other's memory; sends, receives and what offcore cannot compute go by gloo and NCCL. Groups
that span hosts evenly use offcore inside each (docs/hosts.md). `report` says what went where. See
docs/training.md.
"""

from offcore.distributed.group import Options, configure, register
from offcore.distributed.report import report

__all__ = ["Options", "configure", "register", "report"]

register()
