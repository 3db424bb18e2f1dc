"""The cluster a job runs on: GPUs by name, CPUs by a short measurement of all ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from ds_autoplan.integrations.calibration.measure import known_gpu, measured_cpus, measured_gpus

from ds_autoplan.cluster import Topology, device_table, parse_cluster
from ds_autoplan.errors import BadInputError


def detect_cluster(spec: str, calibrate: bool = False) -> Topology:
    """The cluster named by `spec`, or the one this job runs on where it is "detect".

    Args:
        spec: a cluster, a cluster JSON, or "detect".
        calibrate: measure GPUs too, where they are detected.

    Raises:
        BadInputError: the GPUs are of a kind that is not bundled, or `spec` is for another world.
    """
    world = dist.get_world_size()
    if spec != "detect":
        topology = parse_cluster(spec)
        if topology.num_devices != world:
            raise BadInputError(
                f'"cluster" is {spec!r} with {topology.num_devices} devices; {world} ranks run.',
                "A job is planned for the ranks that started.",
                'Remove "cluster", or start that many ranks.',
            )
        return topology
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if not torch.cuda.is_available():
        return measured_cpus(world, per_node)
    if calibrate:
        return measured_gpus(world, per_node)
    name = known_gpu()
    if not name:
        raise BadInputError(
            f"The GPU {torch.cuda.get_device_name()!r} is not known.",
            "The planner needs its speed and links.",
            'Set "calibrate": true in "autoplan" to measure them, or "cluster" to a cluster JSON '
            "(see docs) or the nearest of: " + ", ".join(device_table()) + ".",
        )
    return parse_cluster(f"{world // per_node}x{per_node}x{name}")
