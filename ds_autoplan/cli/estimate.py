"""`ds-autoplan estimate`."""

from __future__ import annotations

import argparse
import json

from ds_autoplan.cli.jobs import add_job, add_json, cluster_of, positive, workload_of
from ds_autoplan.errors import InfeasibleError
from ds_autoplan.strategy import CHECKPOINTING, Degrees, Strategy

EPILOG = """example:
  ds-autoplan estimate --model llama-2-70b --cluster 8x8xH100-SXM-80GB --seq-length 4096 \\
      --global-batch-size 512 --tp 8 --pp 2 --dp 4 --zero-stage 1 --micro-batch-size 1 \\
      --sequence-parallel --activation-checkpointing selective"""


AXES = {
    "tp": "tensor-parallel",
    "pp": "pipeline-parallel",
    "dp": "data-parallel",
    "cp": "context-parallel degree",
    "ep": "expert-parallel degree",
    "vpp": "interleaved chunks of a stage",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    add_job(parser)
    for name in ("tp", "pp", "dp"):
        parser.add_argument(
            f"--{name}", type=positive, required=True, metavar="N", help=f"{AXES[name]} degree"
        )
    for name in ("cp", "ep", "vpp"):
        parser.add_argument(
            f"--{name}", type=positive, default=1, metavar="N", help=f"{AXES[name]} (1)"
        )
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2, 3),
        required=True,
        help="what data parallelism shards (megatron: 1 is the distributed optimizer)",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=positive,
        required=True,
        metavar="N",
        help="samples of one micro-batch of a model replica",
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="shard activations between tensor-parallel regions",
    )
    parser.add_argument(
        "--activation-checkpointing",
        choices=CHECKPOINTING,
        default="none",
        help="what every layer recomputes (default: none)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Price the setting; status 1 where the degrees cannot be."""
    from ds_autoplan.api import check_workload
    from ds_autoplan.estimate import estimate, estimate_json, exclusions
    from ds_autoplan.model import load_graph

    graph, topology, workload = (
        load_graph(args.model),
        cluster_of(args.cluster),
        workload_of(args),
    )
    check_workload(graph, workload)
    degrees = _degrees(args)
    strategy = Strategy(
        sequence_parallel=args.sequence_parallel,
        activation_checkpointing=args.activation_checkpointing,
    )
    priced = estimate(graph, topology, workload, degrees, strategy)
    capacity = float(topology.device.memory_bytes)
    answer = estimate_json(priced, workload, topology.num_devices, capacity)
    excluded = exclusions(graph, workload, degrees, strategy)
    answer["excluded"] = list(excluded)
    if args.json:
        print(json.dumps(answer))
        return 0
    from ds_autoplan.cli.table import GB, seconds, table

    low, high = priced.range_s
    print(
        f"{graph.name} on {topology.name or args.cluster}: step {seconds(priced.step_s)} "
        f"({seconds(low)} to {seconds(high)}), "
        f"{answer['tokens_per_s_per_gpu']:,.0f} tokens/s per device"
    )
    parts = sorted(priced.breakdown_s.items(), key=lambda item: -item[1])
    print("Step: " + ", ".join(f"{key} {seconds(value)}" for key, value in parts if value > 0))
    keys = list(answer["memory"][0])
    rows = [
        [index, f"{sum(memory.values()) / GB:.1f}", *(f"{memory[key] / GB:.1f}" for key in keys)]
        for index, memory in enumerate(answer["memory"])
    ]
    print(table(["stage", "peak GB", *keys], rows))
    least = min(answer["margin_bytes"])
    print(
        f"Fits in {capacity / GB:.1f} GB per device, {least / GB:.1f} GB to spare at least."
        if least >= 0
        else f"Does not fit: {-least / GB:.1f} GB too many for {capacity / GB:.1f} GB per device."
    )
    for reason in excluded:
        print(f"The planner excludes this: {reason}")
    for note in priced.assumptions:
        print(f"Assumes: {note}")
    return 0


def _degrees(args: argparse.Namespace) -> Degrees:
    count, rest = divmod(args.global_batch_size, args.dp * args.micro_batch_size)
    if rest or count == 0:
        raise InfeasibleError(
            f"dp {args.dp} x micro-batch {args.micro_batch_size} does not divide the global batch "
            f"of {args.global_batch_size}.",
            "global_batch_size = dp * micro_batch_size * num_micro_batches.",
            "Choose a micro-batch size or dp that divides it.",
        )
    return Degrees(
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        cp=args.cp,
        ep=args.ep,
        vpp=args.vpp,
        zero_stage=args.zero_stage,
        micro_batch_size=args.micro_batch_size,
        num_micro_batches=count,
    )
