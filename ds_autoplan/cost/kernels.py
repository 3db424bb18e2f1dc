r"""Seconds of single kernels on one device.

    GEMM (m, k, n):   t = 2mkn / P * (1 + k0/k) + tail * 2 * (128*256*SM) * k / P   and at least
                      (mk + kn) * bytes + mn * output bytes over memory bandwidth, plus a gap
    grouped GEMM:     the same with half a tile of padding on every expert's rows
    P = matmul rate of a long run * the share sustained in training
    attention:        FLOPs that the mask leaves / (matmul rate * share), forward and backward apart
    streaming:        bytes / (vendor bandwidth * memory_efficiency)

The tail says that the last wave of 128x256 tiles over all multiprocessors runs part-filled; it
makes the small GEMMs that tensor parallelism leaves slower per FLOP, smoothly and monotonically.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_autoplan.cluster.topology import Device
from ds_autoplan.cost import constants as fitted
from ds_autoplan.cost.constants import Constants
from ds_autoplan.errors import UnsupportedError

TILE = 128 * 256
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "fp4": 0.5}


@dataclass(frozen=True)
class Kernels:
    """Kernel times of one device at one GEMM precision; build with :func:`kernels_for`."""

    device: Device
    precision: str
    rate: float  # FLOP/s sustained by large GEMMs
    base_rate: float  # the same at the 16-bit (or fp32) precision that attention and head run in
    matmul_rate: float  # FLOP/s of a long 16-bit (or fp32) matmul run
    memory_rate: float  # bytes/s of streaming kernels
    attention_forward: float
    attention_backward: float
    constants: Constants
    calibrated: bool

    def gemm_s(
        self,
        m: float,
        k: float,
        n: float,
        count: float = 1.0,
        base: bool = False,
        accumulate: bool = False,
        padded: float = 1.0,
    ) -> float:
        """`count` GEMMs of (m, k) x (k, n) launched together (a grouped GEMM).

        `accumulate`: the output is a gradient, added to an fp32 buffer. `padded`: work done over
            work
        needed. `base`: run in 16 bits whatever the training precision.
        """
        if m <= 0 or k <= 0 or n <= 0:
            return 0.0
        constants = self.constants
        rate = self.base_rate if base else self.rate
        flops = 2.0 * m * k * n * count
        tail = constants.tail_waves * 2.0 * TILE * self.device.multiprocessors * k / rate
        compute = flops * padded / rate * (1.0 + constants.tile_setup_k / k)
        compute += min(tail, flops / rate)
        element = 4.0 if self.precision == "fp32" else 2.0
        output = 8.0 if accumulate else element
        memory = count * ((m * k + k * n) * element + m * n * output) / self.memory_rate
        return max(compute, memory) + constants.kernel_gap_s

    def attention_s(self, flops: float, backward: bool) -> float:
        """Fused attention core with `flops` forward FLOPs after masking."""
        share = self.attention_backward if backward else self.attention_forward
        # Backward recomputes the scores: five products where forward has two.
        work = flops * (2.5 if backward else 1.0)
        return work / (self.matmul_rate * share) + self.constants.kernel_gap_s

    def stream_s(self, bytes_moved: float) -> float:
        """A memory-bound kernel that moves `bytes_moved` (read plus written)."""
        return bytes_moved / self.memory_rate


def kernels_for(
    device: Device,
    precision: str,
    constants: Constants,
    attention: str = "fused",
    measured: bool = False,
) -> Kernels:
    """The :class:`Kernels` of `device` when GEMMs run in `precision`.

    `measured`: the device's rates were measured where the job runs, so nothing is taken off them
    beyond what is known to go under sustained load.

    Raises:
        UnsupportedError: the device does not compute in that precision.
    """
    base = "fp32" if precision == "fp32" else "bf16"
    if base not in device.peak_flops:
        base = "fp16"
    if precision not in device.peak_flops and not (precision == "fp16" and base == "bf16"):
        raise UnsupportedError(
            f"The device {device.name} does not compute in {precision}.",
            f"It knows {', '.join(device.peak_flops)}.",
            "Choose one of these with --precision.",
        )
    rate, sure = _rate(device, precision, constants, measured)
    base_rate, base_sure = _rate(device, base, constants, measured)
    known = constants.attention_share
    shares = known.get((device.architecture, attention)) or known.get(
        (device.architecture, "fused")
    )
    shares = shares or fitted.ATTENTION_SHARE_DEFAULT
    return Kernels(
        device=device,
        precision=precision,
        rate=rate,
        base_rate=base_rate,
        matmul_rate=_matmul_flops(device, base),
        memory_rate=device.memory_bytes_per_s * (1.0 if measured else constants.memory_efficiency),
        attention_forward=shares[0],
        attention_backward=shares[1],
        constants=constants,
        calibrated=sure and base_sure,
    )


def _matmul_flops(device: Device, precision: str) -> float:
    share = fitted.MATMUL_SHARE.get(device.architecture, fitted.MATMUL_SHARE_DEFAULT)
    return device.matmul_flops.get(precision) or device.peak_flops[precision] * share


def _rate(
    device: Device, precision: str, constants: Constants, measured: bool
) -> tuple[float, bool]:
    key = "bf16" if precision == "fp16" and "bf16" in device.peak_flops else precision
    sustained = constants.sustained.get((device.name, key))
    if sustained is None:
        sustained = constants.sustained.get((device.architecture, key))
    if sustained is not None:
        return _matmul_flops(device, key) * sustained, True
    share = 1.0 if measured else fitted.SUSTAINED_DEFAULT
    return _matmul_flops(device, key) * share, measured
