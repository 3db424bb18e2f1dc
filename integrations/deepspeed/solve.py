"""Ask the planner for a running job's plan: the model's graph, its cluster, the user's pins."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ds_autoplan.integrations.transformers.graph_of_modules import (
    graph_of_modules,
    graph_of_structure,
)
from ds_autoplan.integrations.transformers.structure import ModelStructure
from torch import nn

from ds_autoplan.api import plan as make_plan
from ds_autoplan.cluster import Topology
from ds_autoplan.config import AutoplanConfig
from ds_autoplan.errors import InfeasibleError, UnsupportedError
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.model.load import graph_of_config
from ds_autoplan.plan import Plan
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.workload import Workload
from ds_autoplan.writing import make_folder

log = logging.getLogger("ds_autoplan")

# Best effort: how often a device's memory is assumed a quarter larger before giving up.
MORE_MEMORY, LARGEST_MEMORY = 1.25, 64.0


def solve(
    model: nn.Module,
    structure: ModelStructure | None,
    refusal: str,
    workload: Workload,
    autoplan: AutoplanConfig,
    topology: Topology,
    zero_stages: list[int],
) -> Plan:
    """The fastest plan for this job.

    Args:
        model: the user's model.
        structure: what is known of it, None where it was not recognised.
        refusal: why it was not recognised.
        workload: batch, sequence, precision, optimizer.
        autoplan: the user's pins and limits.
        topology: the cluster.
        zero_stages: ZeRO stages that the script is written for.

    Raises:
        AutoplanError: no plan satisfies the pins, or none fits.
    """
    graph = graph_of(model, structure, refusal)
    pins = autoplan.pins()
    pins.setdefault("zero_stage", zero_stages)
    options = PlanOptions(
        pins=pins,
        pipeline=autoplan.pipeline,
        tensor_parallel=autoplan.tensor_parallel,
        memory_reserve_gb=autoplan.memory_reserve_gb,
        time_limit_s=autoplan.time_limit_s,
    )
    cached = _cache_file(autoplan, graph, topology, workload, options)
    if cached is not None and cached.is_file():
        return Plan.load(cached)
    try:
        plan = make_plan(graph, topology, workload, options)
    except InfeasibleError as error:
        if autoplan.on_infeasible != "best_effort":
            raise
        plan = _nearest(graph, topology, workload, options, error)
    if cached is not None:
        make_folder(cached.parent, "plan_cache")
        plan.save(cached)
    return plan


def graph_of(model: nn.Module, structure: ModelStructure | None, refusal: str) -> BlockGraph:
    """The model's block graph: from its config where that is known, else from its modules."""
    if structure is None:
        return graph_of_modules(model, refusal)
    config = model.config
    name = Path(str(getattr(config, "name_or_path", "") or config.model_type)).name
    try:
        graph = graph_of_config(config.to_dict(), name)
    except UnsupportedError:
        return graph_of_structure(structure)
    attention = all(b.attention is not None and b.attention.shardable for b in structure.blocks)
    mlp = all(block.mlp is not None for block in structure.blocks)
    allowed = {name for name, ok in (("attention", attention), ("mlp", mlp)) if ok}
    classes = tuple(replace(item, shardable=item.shardable & allowed) for item in graph.classes)
    return replace(
        graph,
        classes=classes,
        tensor_refusal=graph.tensor_refusal or structure.tensor_refusal,
        pipeline_refusal=graph.pipeline_refusal or structure.pipeline_refusal,
    )


def _nearest(
    graph: BlockGraph,
    topology: Topology,
    workload: Workload,
    options: PlanOptions,
    error: InfeasibleError,
) -> Plan:
    """The plan that needs the least memory beyond the device's, to within a quarter."""
    factor = MORE_MEMORY
    while factor <= LARGEST_MEMORY:
        device = topology.device
        larger = replace(device, memory_bytes=int(device.memory_bytes * factor))
        try:
            plan = make_plan(graph, replace(topology, device=larger), workload, options)
        except InfeasibleError:
            factor *= MORE_MEMORY
            continue
        log.warning(
            "ds_autoplan: nothing fits (%s). Best effort: this plan needs up to %.0f%% of a "
            "device's memory.",
            error,
            100 * factor,
        )
        return plan
    raise error


def _cache_file(
    autoplan: AutoplanConfig,
    graph: BlockGraph,
    topology: Topology,
    workload: Workload,
    options: PlanOptions,
) -> Path | None:
    if autoplan.plan_cache is None:
        return None
    inputs: list[Any] = [graph, topology.describe(), asdict(workload), options]
    key = hashlib.sha256(json.dumps([repr(item) for item in inputs]).encode()).hexdigest()[:16]
    return Path(autoplan.plan_cache) / f"plan-{key}.json"
