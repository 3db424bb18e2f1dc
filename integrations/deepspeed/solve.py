"""Ask the planner for a running job's plan: the model's graph, the cluster it runs on, the user's pins."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ds_autoplan.config import AutoplanConfig
from ds_autoplan.plan import Plan
from ds_autoplan.workload import Workload
from torch import nn

from ds_autoplan.integrations.transformers.structure import ModelStructure


def solve(
    model: nn.Module,
    structure: ModelStructure | None,
    refusal: str,
    workload: Workload,
    autoplan: AutoplanConfig,
) -> Plan:
    """The fastest plan for this job.

    Raises:
        AutoplanError: no plan satisfies the pins, or none fits.
    """
    raise NotImplementedError
