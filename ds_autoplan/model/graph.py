"""The block graph: what planning knows of a model. Plain data, no torch.

A transformer is an embedding, one stack (or several) of blocks, a final norm and a head. Blocks of
equal structure are one :class:`BlockClass`; the graph keeps, for each layer, the index of its
class. Everything that costs time or memory is an :class:`Operator` with its true shape, so that
parameter counts equal the model's and FLOPs can be counted from the graph alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Attention:
    """Shape of one attention layer (sizes in elements, heads as counts over the whole model).

    `window` is the sliding-window or chunk length in tokens (None: full); `causal` masks the
    future. `value_head_dim` differs from `head_dim` under multi-head latent attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    causal: bool = True
    window: int | None = None
    cross: bool = False


@dataclass(frozen=True)
class Mlp:
    """Shape of one MLP or mixture of experts.

    Dense: `num_experts` is 0. Mixture: each token visits `top_k` of `num_experts` experts of width
    `intermediate_size`, plus a shared expert of width `shared_intermediate_size` (0: none).
    """

    intermediate_size: int
    gated: bool
    num_experts: int = 0
    top_k: int = 0
    shared_intermediate_size: int = 0


@dataclass(frozen=True)
class Operator:
    """One weight-bearing or time-taking operator of a block.

    Attributes:
        name: dotted name inside the block, as the Hugging Face module has it where known.
        kind: "linear", "norm", "attention_core", "activation", "embedding", "router", "experts",
            "convolution", "state_space", "rotary", "residual".
        role: what sharding needs to know: "q", "k", "v", "qkv", "attention_out", "gate", "up",
            "gate_up", "down", "norm", "qk_norm", "router", "expert_gate_up", "expert_down",
            "shared_gate", "shared_up", "shared_down", "q_a", "q_b", "kv_a", "kv_b"
            (latent attention), "cross_q", "cross_k", "cross_v", "cross_out", "sinks",
            "relative_bias", "word", "position", "head", "other".
        in_features: size of the contracted dimension (0 where there is none).
        out_features: size of the produced dimension (0 where there is none).
        num_parameters: weights and biases, over the whole model (not per rank).
        has_bias: whether `num_parameters` includes a bias of `out_features`.
    """

    name: str
    kind: str
    role: str
    in_features: int = 0
    out_features: int = 0
    num_parameters: int = 0
    has_bias: bool = False


@dataclass(frozen=True)
class BlockClass:
    """Blocks that have the same structure, whatever their names.

    `shardable` names what the runtime may split over tp: a subset of {"attention", "mlp"}. A part
    that is not in it is replicated on every tp rank. `parallel_residual`: attention and MLP read
    the same normed input (falcon, gpt_neox, phi), so one all-reduce is not saved but the norms are
    fewer. `hidden_size` is the block's own width where it differs from the graph's (0: the
    graph's), and `token_fraction` its tokens as a share of the workload's sequence (swin's later
    stages: 1/4, 1/16).
    """

    fingerprint: str
    module_class: str
    attention: Attention | None
    mlp: Mlp | None
    operators: tuple[Operator, ...]
    parallel_residual: bool = False
    shardable: frozenset[str] = frozenset({"attention", "mlp"})
    cross_attention: Attention | None = None
    hidden_size: int = 0
    token_fraction: float = 1.0

    @cached_property
    def num_parameters(self) -> int:
        """Weights and biases of one block, over the whole model."""
        return sum(operator.num_parameters for operator in self.operators)


@dataclass(frozen=True)
class SkipEdge:
    """A value made by layer `source` that layer `target` reads, beside the chain of hidden states.

    `elements_per_token` is its size; a tie (`weight`) instead moves `weight_elements` gradients a
    step.
    Sources: encoder output into every decoder block, tied embedding and head.
    """

    source: int
    target: int
    elements_per_token: int = 0
    weight_elements: int = 0


@dataclass(frozen=True)
class BlockGraph:
    """A whole model, folded.

    Attributes:
        name: display name ("llama-3-70b").
        model_type: Hugging Face `model_type` ("llama").
        hidden_size: width of the hidden states between blocks.
        vocab_size: rows of the word embedding (0: the model has none).
        max_position: longest sequence the model takes.
        classes: the distinct block classes.
        layers: for each layer in order, the index into `classes`.
        embedding: operators before the first block (word and position embeddings, their norm).
        head: operators after the last block (final norm, head).
        tied: the head shares the word embedding's weight.
        skip_edges: dependencies beside the chain.
        pipeline_refusal: why the model cannot be cut into stages; "" if it can.
        tensor_refusal: why no part can be sharded over tp; "" if it can.
        num_modules: modules of the Hugging Face model, for the folding report (0: unknown).
        facts: what else is known of it, as text for reports.
        layer_names: dotted module name of each layer ("" or empty where unknown).
    """

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    max_position: int
    classes: tuple[BlockClass, ...]
    layers: tuple[int, ...]
    embedding: tuple[Operator, ...]
    head: tuple[Operator, ...]
    tied: bool
    skip_edges: tuple[SkipEdge, ...] = ()
    pipeline_refusal: str = ""
    tensor_refusal: str = ""
    num_modules: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    layer_names: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of blocks over all stacks."""
        return len(self.layers)

    @cached_property
    def num_parameters(self) -> int:
        """Weights and biases of the whole model; a tied head counts once."""
        blocks = sum(self.classes[index].num_parameters for index in self.layers)
        ends = sum(operator.num_parameters for operator in self.embedding + self.head)
        return blocks + ends

    def cut_after(self, layer: int) -> tuple[float, float]:
        """`cut_elements` after `layer`; after the last one what the head reads.

        Interleaved, the head may stand alone in the last chunk.
        """
        return self.cut_elements[min(layer + 1, self.num_layers - 1)]

    @cached_property
    def cut_elements(self) -> tuple[tuple[float, float], ...]:
        """For the cut before each layer: elements per token of hidden states, and of skip edges.

        Per token of the workload's sequence. A value that several later layers read crosses a cut
        once, and right after its source it is the hidden state itself. No cut is before layer 0.
        """
        hidden = []
        for index in self.layers:
            block = self.classes[index]
            hidden.append((block.hidden_size or self.hidden_size) * block.token_fraction)
        skipped = [0.0] * self.num_layers
        reach: dict[int, tuple[int, int]] = {}
        for edge in self.skip_edges:
            if edge.elements_per_token:
                target, elements = reach.get(edge.source, (0, 0))
                reach[edge.source] = (
                    max(target, edge.target),
                    max(elements, edge.elements_per_token),
                )
        for source, (target, elements) in reach.items():
            for position in range(source + 2, min(target, self.num_layers - 1) + 1):
                skipped[position] += elements
        return tuple(zip(hidden, skipped, strict=True))
