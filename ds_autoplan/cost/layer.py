r"""Price of one block on one rank: forward, backward, exposed traffic, per-step work.

forward_s  = GEMMs + attention core + streaming (norms, residuals, activations, casts)
             + exposed tp/cp/ep traffic; never less than the host needs to launch its kernels
backward_s = input and weight gradients (two GEMMs for one) + attention backward + streaming
             + traffic + what checkpointing recomputes
per_step_s = gradient reduction and parameter gather beyond what hides under this layer's own
             compute, and the optimizer's pass over the local states
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_autoplan.cost.eager import eager_traffic_bytes, keeps_of
from ds_autoplan.cost.interface import LayerCost
from ds_autoplan.cost.memory import activation_bytes
from ds_autoplan.cost.setting import Detail, Pass, Setting
from ds_autoplan.cost.shapes import (
    Gemm,
    LocalBlock,
    attention_flops,
    local_block,
    mixer_elements,
)
from ds_autoplan.cost.sharing import shared_state
from ds_autoplan.model.graph import BlockClass
from ds_autoplan.strategy import Degrees, Strategy


@dataclass(frozen=True)
class Work:
    """What one micro-batch does in a block.

    It depends on tp, cp, ep, order and micro-batch size, not on dp, pp, the ZeRO stage or the
    number of micro-batches, so many candidates share it.
    """

    local: LocalBlock
    forward: Pass
    backward: Pass
    recompute: Pass
    kept_bytes: float
    transient_bytes: float


def own_setting(setting: Setting, block: BlockClass) -> Setting:
    """The setting with a block's own width and its share of the tokens (swin's later stages)."""
    if not block.hidden_size and block.token_fraction == 1.0:
        return setting
    seq_length = max(1, round(setting.workload.seq_length * block.token_fraction))
    return replace(
        setting,
        hidden=block.hidden_size or setting.hidden,
        workload=replace(setting.workload, seq_length=seq_length),
    )


def block_work(setting: Setting, block: BlockClass, strategy: Strategy, degrees: Degrees) -> Work:
    """Passes and activations of one block."""
    setting = own_setting(setting, block)
    tokens = setting.tokens(degrees)
    local = local_block(
        block,
        strategy,
        degrees,
        tokens,
        setting.framework.expert_imbalance,
        setting.expert_tp(degrees),
    )
    forward, core_s, stream_s = forward_pass(setting, block, local, strategy, degrees)
    backward = backward_pass(setting, block, local, strategy, degrees, forward, core_s, stream_s)
    recompute = Pass(0.0, 0.0, 0.0, 0.0)
    if strategy.activation_checkpointing == "full":
        recompute = forward
    elif strategy.activation_checkpointing == "selective":
        recompute = Pass(selected_s(setting, local, core_s, stream_s), 0.0, 0.0, 0.0)
    kept, transient = activation_bytes(
        block,
        setting.hidden,
        setting.workload.seq_length,
        tokens,
        strategy,
        degrees,
        setting.workload,
        setting.framework,
        setting.model_type,
    )
    return Work(local, forward, backward, recompute, kept, transient)


def selected_s(setting: Setting, local: LocalBlock, core_s: float, stream_s: float) -> float:
    """Seconds of what selective checkpointing recomputes in a block."""
    if setting.framework.selective == "attention":
        return core_s
    kernels = setting.kernels
    if setting.framework.selective == "mlp":
        parts = [g for g in local.gemms if g.part == "mlp"]
        return sum(kernels.gemm_s(g.m, g.k, g.n) for g in parts) + stream_s / 2.0
    return sum(kernels.gemm_s(g.m, g.k, g.n, g.count) for g in local.gemms) / 2.0 + stream_s


def block_cost(setting: Setting, work: Work, degrees: Degrees) -> tuple[LayerCost, Detail]:
    """The :class:`LayerCost` of one block, and its traffic by cause."""
    local, forward, backward, recompute = work.local, work.forward, work.backward, work.recompute
    states, reduced, per_step, gathered, dp_s = shared_state(
        setting, local.parameters, local.expert_parameters, degrees, forward, backward
    )
    traffic = forward.communication_s + backward.communication_s + recompute.communication_s
    zero3 = gathered.forward_s + gathered.backward_s
    waste = 1.0 + setting.framework.wasted(degrees.vpp)
    added_s = accumulation_s(setting, local, degrees)
    cost = LayerCost(
        forward_s=forward.total_s + gathered.forward_s,
        backward_s=backward.total_s + recompute.total_s + gathered.backward_s + added_s,
        communication_s=traffic + zero3,
        gradient_bytes_reduced=reduced,
        parameter_bytes=states[0],
        gradient_bytes=states[1],
        optimizer_bytes=states[2],
        activation_bytes=work.kept_bytes * waste,
        workspace_bytes=(work.transient_bytes + gathered.workspace_bytes) * waste,
        per_step_s=per_step,
    )
    passes = (forward, backward, recompute)
    detail = Detail(
        sum(each.tp_s for each in passes),
        sum(each.cp_s for each in passes),
        sum(each.ep_s for each in passes),
        zero3,
        dp_s,
    )
    return cost, detail


def accumulation_s(setting: Setting, local: LocalBlock, degrees: Degrees) -> float:
    """Adding a micro-batch's gradients to the kept ones: both read, the sum written.

    ZeRO 3 keeps a part of them only.
    """
    if not setting.framework.separate_accumulation or degrees.num_micro_batches == 1:
        return 0.0
    if degrees.zero_stage == 3:
        return 0.0
    kept = setting.framework.gradient_bytes or setting.element
    parameters = (local.parameters + local.expert_parameters) * setting.workload.trainable_fraction
    return setting.kernels.stream_s(parameters * (setting.element + 2.0 * kept))


def forward_pass(
    setting: Setting,
    block: BlockClass,
    local: LocalBlock,
    strategy: Strategy,
    degrees: Degrees,
) -> tuple[Pass, float, float]:
    """Forward of a block: (pass, attention core seconds, streaming seconds)."""
    kernels, framework = setting.kernels, setting.framework
    gemm_s = sum(
        kernels.gemm_s(g.m, g.k, g.n, g.count, padded=padding(setting, g)) for g in local.gemms
    )
    core_s = attention_core_s(setting, block, local, degrees, backward=False)
    fused = streamed_bytes(setting, block, local, strategy, degrees)
    moved = fused * framework.elementwise_passes
    if framework.eager_operators:
        eager = eager_traffic_bytes(
            block,
            keeps_of(setting.model_type),
            setting.hidden,
            setting.element,
            local.tp_attention,
            local.tp_mlp,
            degrees.tp if strategy.sequence_parallel else 1,
        )
        moved = max(moved, fused + local.tokens * eager)
    stream_s = kernels.stream_s(moved)
    stream_s += kernels.stream_s(cast_bytes(setting, local, strategy, degrees))
    compute = gemm_s + core_s + stream_s
    if not framework.cuda_graphs:
        compute = max(compute, launches(setting, block, degrees) * setting.constants.host_launch_s)
    compute += stall_s(setting, block, degrees)
    compute += launches(setting, block, degrees) * framework.launch_stall_s
    tp_s, cp_s, ep_s = traffic_s(setting, block, local, strategy, degrees, core_s)
    return Pass(compute, tp_s, cp_s, ep_s), core_s, stream_s


def backward_pass(
    setting: Setting,
    block: BlockClass,
    local: LocalBlock,
    strategy: Strategy,
    degrees: Degrees,
    forward: Pass,
    core_forward_s: float,
    stream_forward_s: float,
) -> Pass:
    """Backward of a block without recomputation."""
    kernels, framework = setting.kernels, setting.framework
    frozen = setting.workload.trainable_fraction
    gemm_s = 0.0
    for g in local.gemms:
        padded = padding(setting, g)
        gemm_s += kernels.gemm_s(g.m, g.n, g.k, g.count, padded=padded)
        accumulate = framework.gradient_bytes == 4 and not framework.separate_accumulation
        # The padded rows are what weight gradients contract over.
        gemm_s += frozen * kernels.gemm_s(g.k, g.m * padded, g.n, g.count, accumulate=accumulate)
    core_s = attention_core_s(setting, block, local, degrees, backward=True)
    compute = gemm_s + core_s + 2.0 * stream_forward_s
    if not setting.framework.cuda_graphs:
        host = 2.0 * launches(setting, block, degrees) * setting.constants.host_launch_s
        compute = max(compute, host)
    compute += stall_s(setting, block, degrees)
    compute += 2.0 * launches(setting, block, degrees) * setting.framework.launch_stall_s
    cp_s = forward.cp_s
    if degrees.cp > 1:
        cp_s = traffic_s(setting, block, local, strategy, degrees, core_s, backward=True)[1]
    tp_s = forward.tp_s + regather_s(setting, local, strategy, degrees)
    return Pass(compute, tp_s, cp_s, forward.ep_s)


def regather_s(setting: Setting, local: LocalBlock, strategy: Strategy, degrees: Degrees) -> float:
    """Exposed time of gathering hidden states once more, for weight gradients.

    Sequence-parallel linears keep a rank's piece; it is gathered while the input gradient is
    computed. HF blocks keep what was gathered.
    """
    if degrees.tp == 1 or not strategy.sequence_parallel or setting.framework.eager_blocks:
        return 0.0
    stream = local.tokens * setting.hidden * setting.element
    first = [g for g in local.gemms if g.k == setting.hidden and g.part != "experts"]
    gathered = len({g.part for g in first}) * setting.collective(
        "all_gather", stream, degrees, "tp"
    )
    covered = sum(setting.kernels.gemm_s(g.m, g.n, g.k, g.count) for g in first)
    return max(0.0, gathered - covered)


def padding(setting: Setting, gemm: Gemm) -> float:
    """Work of a GEMM over what its rows need: experts are padded to tiles."""
    if gemm.part != "experts" or gemm.m <= 0:
        return 1.0
    return 1.0 + setting.constants.expert_padding_rows / gemm.m


def attention_core_s(
    setting: Setting, block: BlockClass, local: LocalBlock, degrees: Degrees, backward: bool
) -> float:
    """Scores, softmax and values of all attentions of a block."""
    total = 0.0
    kernels = setting.kernels
    seq = setting.workload.seq_length
    for attention in (block.attention, block.cross_attention):
        if attention is None:
            continue
        if setting.framework.attention != "unfused":
            flops = attention_flops(attention, local.tokens, seq, local.tp_attention)
            total += kernels.attention_s(flops, backward)
            continue
        flops = attention_flops(attention, local.tokens, seq, local.tp_attention, masked=False)
        scores = local.tokens * seq * attention.num_heads / local.tp_attention
        e = setting.element
        # Forward: scores written; masked softmax reads and writes; dropout reads, writes and keeps
        # a byte; values read. Backward reads and writes the same again with the saved ones.
        moved = scores * (6.0 * e + 1.0) * (1.5 if backward else 1.0)
        rate = kernels.base_rate
        if attention.head_dim % 8 and setting.element == 2:
            rate = kernels.device.peak_flops["fp32"] * setting.constants.misaligned_share
        total += flops * (2.0 if backward else 1.0) / rate + kernels.stream_s(moved)
    return total


def streamed_bytes(
    setting: Setting, block: BlockClass, local: LocalBlock, strategy: Strategy, degrees: Degrees
) -> float:
    """Bytes that norms, residuals, rotary and activation functions move forward, fused."""
    e = setting.element
    tokens = local.tokens
    sequence_ways = degrees.tp if strategy.sequence_parallel else 1
    norms = 1 if block.parallel_residual else 2
    # A norm reads and writes; dropout and residual read two and write one.
    moved = norms * 5.0 * tokens * setting.hidden * e / sequence_ways
    if block.attention is not None:
        width = block.attention.head_dim * (
            block.attention.num_heads + block.attention.num_kv_heads
        )
        moved += 2.0 * tokens * width * e / local.tp_attention
    moved += 2.0 * tokens * mixer_elements(block) * e
    mlp = block.mlp
    if mlp is not None:
        inner = mlp.shared_intermediate_size + mlp.intermediate_size * max(1, mlp.top_k)
        moved += (3.0 if mlp.gated else 2.0) * tokens * inner * e / local.tp_mlp
        if mlp.num_experts:
            # Permute and unpermute: each read and written, once before and once after the experts.
            passes = setting.framework.permute_passes
            moved += passes * tokens * mlp.top_k * setting.hidden * e / degrees.tp
    return moved


def cast_bytes(setting: Setting, local: LocalBlock, strategy: Strategy, degrees: Degrees) -> float:
    """Bytes moved to quantise GEMM inputs: read 16 bits, write 8 and its transpose.

    Under sequence parallelism hidden states are quantised before they are gathered.
    """
    if setting.kernels.precision not in ("fp8", "fp4"):
        return 0.0
    constants = setting.constants
    hopper = setting.topology.device.architecture == "hopper"
    per_element = constants.cast_bytes_hopper if hopper else constants.cast_bytes
    if setting.framework.fused_casts:
        per_element = constants.cast_bytes_fused
    ways = degrees.tp if strategy.sequence_parallel else 1
    return per_element * sum(
        g.m * g.k * g.count / (ways if g.k == setting.hidden else 1) for g in local.gemms
    )


def stall_s(setting: Setting, block: BlockClass, degrees: Degrees) -> float:
    """Idle time of one pass through a mixture layer: half of forward and backward together."""
    if block.mlp is None or not block.mlp.num_experts:
        return 0.0
    local = block.mlp.num_experts / degrees.ep
    framework = setting.framework
    return 0.5 * (framework.dispatch_stall_s + framework.expert_stall_s * local)


def launches(setting: Setting, block: BlockClass, degrees: Degrees) -> float:
    """Kernels launched by one forward of a block."""
    count = float(setting.framework.kernels_per_layer)
    if block.mlp is not None and block.mlp.num_experts:
        count += setting.framework.kernels_per_moe
    return count


def traffic_s(
    setting: Setting,
    block: BlockClass,
    local: LocalBlock,
    strategy: Strategy,
    degrees: Degrees,
    core_s: float,
    backward: bool = False,
) -> tuple[float, float, float]:
    """Exposed (tp, cp, ep) seconds of one forward (or backward) through a block."""
    e = setting.element
    stream = local.tokens * setting.hidden * e
    tp_s = cp_s = ep_s = 0.0
    if degrees.tp > 1:
        parts = (1 if local.tp_attention > 1 or strategy.sequence_parallel else 0) + (
            1 if local.tp_mlp > 1 or strategy.sequence_parallel else 0
        )
        if strategy.sequence_parallel:
            once = setting.collective("all_gather", stream, degrees, "tp")
            once += setting.collective("reduce_scatter", stream, degrees, "tp")
        else:
            once = setting.collective("all_reduce", stream, degrees, "tp")
        tp_s = parts * once * (1.0 - setting.framework.tp_overlap)
    if degrees.cp > 1 and block.attention is not None:
        attention = block.attention
        width = attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
        own = local.tokens * width * e / min(local.tp_attention, attention.num_kv_heads)
        ring = setting.collective("all_gather", own * degrees.cp, degrees, "cp")
        if backward:
            ring *= 2.0
        hidden = core_s * (degrees.cp - 1) / degrees.cp
        slowed = min(ring, hidden) * setting.constants.overlap_slowdown
        cp_s = max(0.0, ring - hidden) + slowed
    if degrees.ep > 1 and block.mlp is not None and block.mlp.num_experts:
        exchange = setting.exchange(
            local.tokens / degrees.tp * setting.hidden * e, block.mlp.top_k, degrees
        )
        ep_s = 2.0 * exchange * (1.0 - setting.framework.ep_overlap)
    if setting.expert_tp(degrees) > 1 and local.expert_parameters and block.mlp is not None:
        # Tokens of all tp ranks visit every rank's slice of the experts.
        routed = local.tokens * block.mlp.top_k * setting.hidden * e
        once = setting.collective("all_gather", routed, degrees, "tp")
        once += setting.collective("reduce_scatter", routed, degrees, "tp")
        tp_s += once - tp_s / 2.0
    return tp_s, cp_s, ep_s
