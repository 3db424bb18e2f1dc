"""`estimate`: one setting priced as given, and the errors of settings that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_autoplan.cluster import parse_cluster
from ds_autoplan.errors import InfeasibleError
from ds_autoplan.estimate import estimate, estimate_json, even_cut
from ds_autoplan.model import load_graph
from ds_autoplan.strategy import Degrees, Strategy
from tests.cost.samples import DEGREES, LLAMA, WORKLOAD, price


def test_json_has_one_entry_a_stage_and_adds_up() -> None:
    priced = price()
    data = estimate_json(priced, WORKLOAD, 16, 80e9)
    assert len(data["peak_bytes"]) == len(data["memory"]) == 2
    assert data["peak_bytes"] == [sum(stage.values()) for stage in data["memory"]]
    assert set(data["memory"][0]) == set(
        "parameters gradients optimizer activations workspace overhead".split()
    )
    tokens = WORKLOAD.seq_length * WORKLOAD.global_batch_size
    assert data["tokens_per_s_per_gpu"] == pytest.approx(tokens / priced.step_s / 16)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [2, 3, 3, 2]), (7, 2, [4, 3]), (5, 5, [1] * 5)],
)
def test_an_even_cut_favours_the_ends(layers: int, pp: int, sizes: list[int]) -> None:
    stages = even_cut(layers, pp, Strategy())
    assert [len(stage.layers) for stage in stages] in (sizes, sizes[::-1])
    assert [at for stage in stages for at in stage.layers] == list(range(layers))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (replace(DEGREES, dp=8), "32 ranks, the cluster has 16 devices"),
        (replace(DEGREES, num_micro_batches=5), "does not divide the global batch of 64"),
        (Degrees(pp=16, num_micro_batches=64), "8 layers cannot be cut into 16 stages"),
    ],
)
def test_settings_that_cannot_run_say_why(degrees: Degrees, message: str) -> None:
    graph = load_graph({**LLAMA, "num_hidden_layers": 8})
    topology = parse_cluster("2x8xA100-SXM-80GB")
    with pytest.raises(InfeasibleError, match=message):
        estimate(graph, topology, WORKLOAD, degrees, Strategy())


def test_known_plans_fall_in_the_published_neighbourhood() -> None:
    # Llama-2-7B on eight A100-80GB, dp 8, ZeRO-1, micro-batch 2, sequence 2048, batch 128: two
    # other planners say 6.55 and 6.65 s a step.
    degrees = Degrees(dp=8, zero_stage=1, micro_batch_size=2, num_micro_batches=8)
    step = price("1x8xA100-SXM-80GB", degrees, seq_length=2048, global_batch_size=128).step_s
    assert step == pytest.approx(6.6, rel=0.08)
