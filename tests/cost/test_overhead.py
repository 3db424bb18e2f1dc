"""What a rank holds beside layers: counted by hand, and against figures that others measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost import frameworks
from ds_autoplan.cost.overhead import communicators, overhead_bytes, peers, stage_buffers
from ds_autoplan.model import load_graph
from ds_autoplan.strategy import Degrees
from tests.cost.samples import LLAMA

H100 = "4x8xH100-SXM-80GB"
ALL = Degrees(tp=4, pp=4, dp=2)


@pytest.mark.parametrize(
    ("degrees", "tied", "megatron", "deepspeed"),
    [
        (Degrees(), True, 0, 0),
        # The world and the replicas' group: the same ranks, yet two communicators.
        (Degrees(dp=8), False, 2, 2),
        # World, tp, tp x pp.
        (Degrees(tp=8), False, 3, 3),
        # World, tp, dp, tp x pp; DeepSpeed also sends the loss over the stages.
        (ALL, False, 4, 5),
        (ALL, True, 5, 6),
        (Degrees(cp=4, pp=2), False, 3, 4),
    ],
)
def test_communicators_by_hand(degrees: Degrees, tied: bool, megatron: int, deepspeed: int) -> None:
    assert communicators(frameworks.MEGATRON, degrees, tied) == megatron
    assert communicators(frameworks.DEEPSPEED, degrees, tied) == deepspeed


@pytest.mark.parametrize(
    ("degrees", "count"),
    [
        (Degrees(tp=8, dp=4), 0),
        (Degrees(pp=2, tp=4, dp=4), 1),  # the other stage
        (Degrees(pp=4, tp=8), 2),  # the stage before and the one after
        (Degrees(cp=8, dp=4), 2),  # the ring
        (Degrees(dp=32, ep=4), 3),
        (Degrees(dp=32, ep=32), 7),  # the ranks of the node; others share one buffer
    ],
)
def test_peers_by_hand(degrees: Degrees, count: int) -> None:
    assert peers(parse_cluster(H100), degrees) == count


def test_a_node_of_h100_before_and_after_its_first_all_to_all() -> None:
    """1.06 GB and 4.34 GB outside PyTorch (NVIDIA/nccl, issue 1685)."""
    graph, cluster = load_graph(LLAMA), parse_cluster("1x8xH100-SXM-80GB")
    world = replace(frameworks.MEGATRON, communicators=("all",))
    before = overhead_bytes(graph, cluster, "bf16", world, Degrees(dp=8))
    after = overhead_bytes(graph, cluster, "bf16", world, Degrees(dp=8, ep=8))
    assert before == pytest.approx(1.06e9)
    assert after == pytest.approx(4.34e9)


def test_bloom_was_seen_to_use_8_to_11_gb_beyond_states_and_activations() -> None:
    """With what 12 micro-batches in flight keep between stages (BigScience, nvidia-smi)."""
    graph = replace(load_graph(LLAMA), tied=True)
    degrees = Degrees(tp=4, pp=12, dp=8, zero_stage=1)
    cluster = parse_cluster("48x8xA100-SXM-80GB")
    fixed = overhead_bytes(graph, cluster, "fp16", frameworks.BLOOM, degrees)
    for micro_batch_size in (1, 2, 4):
        stream = micro_batch_size * 2048 * 14336 * 2.0
        per_micro_batch, held = stage_buffers(frameworks.BLOOM, degrees, 0, stream)
        assert 7e9 < fixed + held + 12 * per_micro_batch < 11e9


def test_what_a_cpu_rank_holds_is_the_bucket() -> None:
    graph, cluster = load_graph(LLAMA), parse_cluster("1x4xCPU")
    assert overhead_bytes(graph, cluster, "fp32", frameworks.DEEPSPEED, Degrees(tp=4)) == 0.0
    bucket = overhead_bytes(graph, cluster, "fp32", frameworks.DEEPSPEED, Degrees(dp=4))
    assert bucket == 4 * min(frameworks.DEEPSPEED.bucket_elements, graph.num_parameters)


def test_stages_keep_what_they_send_until_its_gradient_comes_back() -> None:
    degrees, stream = Degrees(pp=4), 100.0
    deepspeed = frameworks.DEEPSPEED
    waste = 1.0 + deepspeed.fragmentation
    found = [stage_buffers(deepspeed, degrees, stage, stream) for stage in range(4)]
    # Kept per micro-batch in flight: not on the last. For good: to receive into, one each way.
    assert found == [
        (100.0 * waste, 100.0),
        (100.0 * waste, 200.0),
        (100.0 * waste, 200.0),
        (0.0, 100.0),
    ]
    assert stage_buffers(deepspeed, Degrees(tp=4), 0, stream) == (0.0, 0.0)
    # Megatron-core frees the output once it is sent.
    assert stage_buffers(frameworks.MEGATRON, degrees, 1, stream) == (0.0, 0.0)
