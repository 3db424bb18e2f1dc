"""The states that the model prices against a real engine's live tensors, for each ZeRO stage."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_autoplan.cost.frameworks import DEEPSPEED
from ds_autoplan.cost.memory import state_bytes
from tests.cost.samples import WORKLOAD

SCRIPT = Path(__file__).with_name("states_of_engine.py")
LAYERS = 8  # of the script's model, all alike


@pytest.mark.distributed
def test_states_equal_the_live_tensors_of_deepspeed() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT)],
        env={**os.environ, "DS_AUTOPLAN": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("STATES ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    measured = json.loads(lines[0].removeprefix("STATES "))
    assert len(measured) == 8
    for name, held in measured.items():
        precision, zero_stage = name.split()
        workload = replace(WORKLOAD, precision=precision)
        states = state_bytes(1.0, 2, int(zero_stage), workload, DEEPSPEED)
        expected = states.parameters + states.gradients + states.optimizer
        # A bucket holds one layer at least, and two of them may be alive.
        bucket = 0.0 if zero_stage == "0" else 2.0 * (4.0 if precision == "fp32" else 2.0) / LAYERS
        assert 0.97 * expected <= held <= 1.03 * expected + bucket, name
