"""Settings that several tests price."""

from __future__ import annotations

from dataclasses import replace

from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost.interface import StepEstimate
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.estimate import even_cut
from ds_autoplan.model import load_graph
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}
WORKLOAD = Workload(seq_length=4096, global_batch_size=64, backend="megatron")
DEGREES = Degrees(tp=2, pp=2, dp=4, zero_stage=1, micro_batch_size=1, num_micro_batches=16)


def price(
    cluster: str = "2x8xA100-SXM-80GB",
    degrees: Degrees = DEGREES,
    strategy: Strategy | None = None,
    model: dict[str, object] | None = None,
    **workload: object,
) -> StepEstimate:
    """One setting, with anything about it replaced."""
    graph = load_graph({**LLAMA, **(model or {})})
    cost = AnalyticCostModel(graph, parse_cluster(cluster), replace(WORKLOAD, **workload))
    if strategy is None:
        strategy = Strategy(sequence_parallel=degrees.tp > 1)
    stages = even_cut(graph.num_layers, degrees.pp, strategy)
    return cost.step(degrees, stages, "shard")
