"""What a plan was made from, as plain data inside the plan: enough to plan again.

`report["inputs"]` of a plan holds {"config" or "graph", "name", "topology", "workload", "options"}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ds_autoplan.errors import BadInputError
from ds_autoplan.model.graph import Attention, BlockClass, BlockGraph, Mlp, Operator, SkipEdge
from ds_autoplan.model.load import graph_of_config
from ds_autoplan.reading import MALFORMED
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.workload import Workload

if TYPE_CHECKING:
    from ds_autoplan.cluster import Topology
    from ds_autoplan.plan import Plan


@dataclass(frozen=True)
class Inputs:
    """Everything that planning is a function of."""

    graph: BlockGraph
    topology: Topology
    workload: Workload
    options: PlanOptions


def record(inputs: Inputs, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The inputs as plain data; the model as its config where there is one, else as its graph."""
    model = {"config": dict(config)} if config is not None else {"graph": _plain(inputs.graph)}
    return {
        **model,
        "name": inputs.graph.name,
        "topology": _plain(inputs.topology),
        "workload": asdict(inputs.workload),
        "options": _plain(inputs.options),
    }


def recall(plan: Plan) -> Inputs:
    """The inputs that a plan was made from.

    Raises:
        BadInputError: the plan does not hold them.
    """
    data = plan.report.get("inputs")
    if not isinstance(data, dict):
        raise BadInputError(
            "The plan does not say what it was made from.",
            "This question needs the model, the cluster and the workload.",
            "Make the plan again with `ds-autoplan plan ... --out FILE`.",
        )
    try:
        if "config" in data:
            graph = graph_of_config(data["config"], data["name"])
        else:
            graph = _graph(data["graph"])
        options = dict(data["options"])
        return Inputs(
            graph, _topology(data["topology"]), Workload(**data["workload"]), PlanOptions(**options)
        )
    except MALFORMED as error:
        raise BadInputError(
            f"The inputs inside the plan cannot be read: {error!r}.",
            "They are what `ds-autoplan plan` wrote.",
            "Make the plan again.",
        ) from error


def recall_any(plan: Plan) -> Inputs | None:
    """The same; None for plans made by hand, which do not say."""
    return recall(plan) if isinstance(plan.report.get("inputs"), dict) else None


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _graph(data: dict[str, Any]) -> BlockGraph:
    plain = dict(data)
    plain["classes"] = tuple(_block(item) for item in data["classes"])
    plain["embedding"] = tuple(Operator(**item) for item in data["embedding"])
    plain["head"] = tuple(Operator(**item) for item in data["head"])
    plain["skip_edges"] = tuple(SkipEdge(**item) for item in data["skip_edges"])
    plain["layers"] = tuple(data["layers"])
    plain["layer_names"] = tuple(data["layer_names"])
    return BlockGraph(**plain)


def _block(data: dict[str, Any]) -> BlockClass:
    plain = dict(data)
    for name in ("attention", "cross_attention"):
        plain[name] = Attention(**data[name]) if data[name] else None
    plain["mlp"] = Mlp(**data["mlp"]) if data["mlp"] else None
    plain["operators"] = tuple(Operator(**item) for item in data["operators"])
    plain["shardable"] = frozenset(data["shardable"])
    return BlockClass(**plain)


def _topology(data: dict[str, Any]) -> Topology:
    from ds_autoplan.cluster.topology import Device, Level, Topology

    plain = dict(data)
    plain["device"] = Device(**data["device"])
    plain["levels"] = tuple(Level(**item) for item in data["levels"])
    if not plain["levels"]:
        raise ValueError("a cluster without levels")
    return Topology(**plain)
