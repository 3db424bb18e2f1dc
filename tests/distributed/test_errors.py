"""What a user can get wrong: one readable message, every rank ends, nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.by_hand import plan_by_hand
from tests.distributed.pool import CONFIG, ROOT, Pool, RanksFailed

pytestmark = pytest.mark.distributed

SCRIPTS = "tests.distributed.scripts.failing"
LAUNCH_S = 150


@dataclass(frozen=True)
class Mistake:
    """A script of scripts/failing.py, the plan it runs under, and what the message must say."""

    script: str
    says: tuple[str, ...]
    kind: str = "UnsupportedError"
    plan: dict[str, Any] = field(default_factory=lambda: {"tp": 2, "pp": 2})
    total: int = 8
    launched: str = "full"


MISTAKES = {
    "loss outside": Mistake(
        "loss_outside",
        ("without labels", "computed inside the model", '"pipeline": false'),
        launched="always",
    ),
    "logits while training": Mistake(
        "logits_of_a_training_call", ("output 'logits' is not available", '"pipeline": false')
    ),
    "a loss with more in it": Mistake(
        "loss_with_more", ("not made of the last call's loss alone", '"pipeline": false')
    ),
    "a loss with more in it, cut": Mistake(
        "loss_with_more",
        ("not made of the last call's loss alone", '"micro_batch_size"'),
        plan={"tp": 4, "micro_batch_size": 2},
    ),
    "backward of the tensor": Mistake("backward_of_the_tensor", ("engine.backward(loss)",)),
    "unknown block": Mistake(
        "unknown_block",
        ("model.layers.1.adapter (Linear, model type 'llama')", "unknown structure"),
    ),
    "batch": Mistake(
        "batch_that_does_not_divide",
        ("train_batch_size is 10", "2 * 1 * 4 = 8", "Correct one of the three"),
        kind="BadInputError",
    ),
    "micro-batch": Mistake(
        "valid",
        ("global_batch_size is 8", "dp * micro_batch_size * num_micro_batches = 6"),
        kind="BadInputError",
        plan={"tp": 2, "pp": 2, "micro_batch_size": 3},
    ),
    "world size": Mistake(
        "valid",
        ("The plan is for 8 ranks (tp 4 x pp 2 x dp 1), but 4 ranks started",),
        plan={"tp": 4, "pp": 2},
        launched="always",
    ),
    "another batch size": Mistake(
        "valid", ("is for 16 samples per step", "the config says 8"), total=16
    ),
    "stepped optimizer": Mistake(
        "stepped_optimizer",
        ("AdamW already holds state for", "shapes of the uncut weights", "before the first step"),
    ),
    "matrix optimizer": Mistake(
        "matrix_optimizer", ("The optimizer Muon", "every element by itself", "use AdamW")
    ),
    "foreign parameter": Mistake(
        "foreign_parameter", ("holds 1 parameters that are not the model's", "[3]")
    ),
    "unknown key": Mistake(
        "unknown_key",
        ("unknown key 'seq_lenght'", "Did you mean 'seq_length'?"),
        kind="BadInputError",
        launched="always",
    ),
    "wrong value": Mistake(
        "wrong_value", ('"autoplan"."tp" is \'four\'', "valid integer"), kind="BadInputError"
    ),
    "rank-dependent arguments": Mistake(
        "rank_dependent_arguments",
        ("called the model with different arguments", "branches that depend on the rank"),
        kind="BadInputError",
    ),
}


def autoplan(mistake: Mistake, folder: Path) -> dict[str, Any]:
    """The key's value: a plan made by hand, saved."""
    planned = plan_by_hand(
        4, global_batch_size=mistake.total, **{"micro_batch_size": 2, **mistake.plan}
    )
    planned.save(folder / "plan.json")
    return {"plan": str(folder / "plan.json")}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_raises_the_same_readable_error(pool: Pool, name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    config = {**CONFIG, "autoplan": autoplan(mistake, tmp_path)}
    with pytest.raises(RanksFailed) as failed:
        pool.run(f"{SCRIPTS}:{mistake.script}", config)
    errors = failed.value.errors
    assert [error and error[0] for error in errors] == [mistake.kind] * 4, errors
    for _, message, _ in (error for error in errors if error):
        for words in mistake.says:
            assert words in message


def test_a_micro_batch_must_divide_a_call(pool: Pool, tmp_path: Path) -> None:
    """Two calls of four samples a step, and a plan of one micro-batch of eight."""
    mistake = Mistake("valid", (), plan={"tp": 2, "pp": 2, "micro_batch_size": 8})
    two_calls = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    config = {**CONFIG, **two_calls, "autoplan": autoplan(mistake, tmp_path)}
    with pytest.raises(RanksFailed) as failed:
        pool.run(f"{SCRIPTS}:valid", config)
    for error in failed.value.errors:
        assert error and error[0] == "UnsupportedError"
        for words in ("holds 8 samples", "brings 4 to a replica", "micro_batch_size that divides"):
            assert words in error[1]


def test_a_cache_that_cannot_be_written_is_said_by_every_rank(pool: Pool, tmp_path: Path) -> None:
    """Rank 0 alone writes; the others wait for its plan."""
    (tmp_path / "file").write_text("")
    config = {**CONFIG, "autoplan": {"plan_cache": str(tmp_path / "file" / "plans")}}
    with pytest.raises(RanksFailed) as failed:
        pool.run(f"{SCRIPTS}:valid", config)
    for error in failed.value.errors:
        assert error and error[0] == "BadInputError" and "plan_cache" in error[1]


def launch(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run scripts/failing.py under DeepSpeed's launcher, on four processes."""
    command = [
        sys.executable,
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_gpus",
        "4",
        str(ROOT / "tests" / "distributed" / "scripts" / "failing.py"),
        *arguments,
    ]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LAUNCH_S, env=environment, check=False
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if mistake.launched == "always" else [pytest.mark.full])
        for name, mistake in MISTAKES.items()
    ],
)
def test_launched_job_ends_with_one_message(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    plan = json.dumps(autoplan(mistake, tmp_path))
    done = launch(["--case", mistake.script, "--autoplan", plan])
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert output.count("ds_autoplan: error:") == 1, output
    assert "Traceback" not in output, output
    for words in mistake.says:
        assert words in output


@pytest.mark.parametrize(
    "plan", [{"tp": 2, "pp": 2}, pytest.param({"tp": 4}, marks=pytest.mark.full)]
)
def test_an_error_of_the_script_on_one_rank_ends_the_job(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    mistake = Mistake("own_error_on_one_rank", (), plan=plan)
    done = launch(["--case", mistake.script, "--autoplan", json.dumps(autoplan(mistake, tmp_path))])
    assert done.returncode != 0
    assert "ValueError: my data is broken" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "more", [["--destroy"], pytest.param([], marks=pytest.mark.full)], ids=["destroyed", "left"]
)
def test_rank_0_saves_alone_at_the_end(more: list[str], tmp_path: Path) -> None:
    mistake = Mistake("save_and_leave", (), plan={"tp": 2, "dp": 2})
    plan = json.dumps(autoplan(mistake, tmp_path))
    folder = tmp_path / "saved"
    done = launch(["--case", mistake.script, "--autoplan", plan, "--folder", str(folder), *more])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "model.safetensors").is_file()
