"""The cluster: devices, link levels, and what collectives cost on them."""

from ds_autoplan.cluster.presets import build_topology, device_table, load_cluster, parse_cluster
from ds_autoplan.cluster.topology import Device, Level, Topology

__all__ = [
    "Device",
    "Level",
    "Topology",
    "build_topology",
    "device_table",
    "load_cluster",
    "parse_cluster",
]
