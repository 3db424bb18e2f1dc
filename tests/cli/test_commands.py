"""The commands: exit status, JSON only, one readable message, start-up without heavy imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.cli import main
from ds_autoplan.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
JOB = ["--model", "llama-2-7b", "--cluster", "1x8xA100-SXM-80GB", "--seq-length", "2048"]
JOB += ["--global-batch-size", "128"]
HEAD_KEYS = {
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "zero_stage",
    "micro_batch_size",
    "num_micro_batches",
    "order",
    "step_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "uncalibrated_fraction",
    "stages",
    "layers",
    "solver",
    "fingerprint",
    "schema_version",
    "deepspeed",
}


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_json_is_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "plan", *JOB, "--json")
    assert status == 0
    assert err == ""
    answer = json.loads(out)
    assert set(answer) == {"plan", "alternatives", "excluded"}
    assert set(answer["plan"]) >= HEAD_KEYS
    stage, layer = answer["plan"]["stages"][0], answer["plan"]["layers"][0]
    assert {"first_layer", "last_layer", "time_s", "peak_bytes", "memory"} <= set(stage)
    assert {"index", "name", "stage", "sharding", "sequence_parallel"} <= set(layer)
    solver = answer["plan"]["solver"]
    assert {"status", "objective_s", "bound_s", "gap", "seconds"} <= set(solver)
    assert {"candidates", "solved", "pruned"} <= set(solver)
    assert len(answer["alternatives"]) == 3
    assert all(item["why"] and item["tp"] for item in answer["alternatives"])
    assert all(set(item) == {"candidate", "reason"} for item in answer["excluded"])
    assert "NaN" not in out
    assert "Infinity" not in out


def test_plan_out_explain_and_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert call(capsys, "plan", *JOB, "--out", a)[0] == 0
    assert call(capsys, "plan", *JOB, "--out", b, "--pin", "tp=2", "--pin", "pp=1,2")[0] == 0
    assert Plan.load(b).degrees.tp == 2
    status, out, _ = call(capsys, "explain", a)
    assert status == 0
    for text in ("Plan ", "stage", "runner-up", "Assumes:", "margin GB", "excluded"):
        assert text in out
    status, out, _ = call(capsys, "explain", a, "--why-not", "tp=8,pp=1")
    assert status == 0
    assert "slower" in out
    status, out, _ = call(capsys, "explain", a, "--why-not", "pp=2,zero_stage=3", "--json")
    assert json.loads(out)["verdict"] == "infeasible"
    status, out, _ = call(capsys, "explain", a, "--json")
    assert json.loads(out)["layer_groups"]
    status, out, _ = call(capsys, "diff", a, b)
    assert status == 0
    assert "tp" in out
    status, out, _ = call(capsys, "diff", a, b, "--json")
    assert json.loads(out)["degrees"]["tp"] == [1, 2]
    status, out, _ = call(capsys, "diff", a, a)
    assert "The same plan" in out


def test_the_same_input_writes_the_same_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        assert call(capsys, "plan", *JOB, "--out", str(file))[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    loaded = Plan.load(files[0])
    assert loaded.solver.seconds is None  # the only figure that differs between runs
    loaded.save(files[1])
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_plan_reports_what_folding_did(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(call(capsys, "plan", *JOB, "--pin", "tp=2", "--json")[1])
    folding = answer["plan"]["report"]["folding"]
    assert folding["blocks"] == len(answer["plan"]["layers"])
    assert folding["distinct_blocks"] == 1
    assert folding["candidates"] == 3**4 * 2  # and the norms, replicated or by tokens
    assert 0 < folding["rejected"] < folding["candidates"]
    assert 0 < folding["kept"] == len(folding["patterns"])
    assert "column-row-column-row-sequence" in folding["patterns"]
    assert "embedding shard, head shard" in folding["vocabulary"]
    assert "Folding: " in call(capsys, "plan", *JOB, "--pin", "tp=2")[1]


def test_runners_up_when_every_degree_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *JOB, "--pin", "tp=2", "--pin", "pp=2", "--json"]
    answer = json.loads(call(capsys, *words)[1])
    others = answer["alternatives"]
    assert len(others) == 3
    assert all((other["tp"], other["pp"]) == (2, 2) and other["why"] for other in others)
    keys = ("zero_stage", "micro_batch_size", "order", "sequence_parallel")
    variants = [tuple(other[key] for key in keys) for other in others]
    head = answer["plan"]
    own = (*(head[key] for key in keys[:3]), head["layers"][0]["sequence_parallel"])
    assert len({*variants, own}) >= 3  # the fourth key of a candidate is the vocabulary
    steps = [head["step_s"], *(other["step_s"] for other in others)]
    assert steps == sorted(steps)


def test_options_reach_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *JOB, "--json", "--top", "1", "--micro-batch-size", "1,2", "--no-pipeline"]
    answer = json.loads(call(capsys, *words, "--no-tensor-parallel")[1])
    head = answer["plan"]
    assert (head["tp"], head["pp"]) == (1, 1)
    assert head["micro_batch_size"] in (1, 2)
    assert len(answer["alternatives"]) <= 1


def test_infeasible_is_status_1_with_relaxations(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *JOB, "--pin", "zero_stage=0", "--pin", "tp=1", "--pin", "pp=1"]
    words += ["--model", "llama-2-13b"]
    status, out, err = call(capsys, *words, "--json")
    assert status == 1
    answer = json.loads(out)
    assert "does not fit in memory" in answer["error"]
    assert answer["relaxations"][0]["step_s"] > 0
    status, out, err = call(capsys, *words)
    assert status == 1
    assert out == ""
    assert err.startswith("ds-autoplan: No plan for llama-2-13b fits in")
    assert len(err.strip().splitlines()) == 1


BAD: list[tuple[list[str], str]] = [
    (["pln"], "Did you mean 'plan'?"),
    (["plan"], "required: --model"),
    (["plan", *JOB, "--modle", "x"], "Did you mean --model?"),
    (["plan", "--modle", "x"], "Did you mean --model?"),
    (["plan", *JOB, "--precision", "bf61"], "invalid choice: 'bf61'"),
    (["plan", *JOB, "--model", "llama-2-8b"], "Did you mean"),
    (["plan", *JOB, "--cluster", "1x8xH1000"], "H1000"),
    (["plan", *JOB, "--cluster", "nonsense"], "nonsense"),
    (["plan", *JOB, "--seq-length", "0"], "'0' is not a positive integer"),
    (["plan", *JOB, "--seq-length", "2k"], "'2k' is not a positive integer"),
    (["plan", *JOB, "--pin", "pt=4"], "Did you mean 'tp'?"),
    (["plan", *JOB, "--pin", "tp=0"], "positive integer"),
    (["plan", *JOB, "--pin", "micro_batch_size=1", "--micro-batch-size", "2"], "Give it once"),
    (
        ["plan", *JOB, "--time-limit", "-1"],
        "time_limit_s is -1.0",
    ),
    (["plan", *JOB, "--top", "-1"], "must not be negative"),
    (["plan", *JOB, "--out", "/no/such/folder/plan.json"], "cannot be written"),
    (["explain", "/no/such/plan.json"], "does not exist"),
    (["explain"], "required: PLAN.json"),
    (["diff", "/no/such/plan.json", "/no/such/plan.json"], "does not exist"),
    (["estimate", *JOB], "required: --tp"),
    (["validate", "/no/such/runs.jsonl"], "does not exist"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_status_2_with_one_message(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    status, out, err = call(capsys, *words)
    assert status == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    status, out, err = call(capsys, *words, "--json")
    assert status == 2
    assert json.loads(out)["error"]


def test_a_plan_file_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    for text in ("{", "[]", "{}", '{"plan": {"schema_version": 99}}'):
        path.write_text(text)
        status, _, err = call(capsys, "explain", str(path))
        assert status == 2
        assert "plan" in err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan", "explain", "diff", "estimate", "validate"):
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert f"ds-autoplan {name}" in capsys.readouterr().out.split("example:")[1]
    assert call(capsys, "--help")[0] == 0
    assert call(capsys)[0] == 2


def test_estimate_of_the_plan_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan with one strategy and an even cut costs what estimate says."""
    pins = {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1, "micro_batch_size": 1}
    words = ["plan", *JOB, "--json", "--pin", "activation_checkpointing=selective"]
    words += ["--pin", "sequence_parallel=true", "--pin", "attention=heads", "--pin", "mlp=shard"]
    for name, value in pins.items():
        words += ["--pin", f"{name}={value}"]
    head = json.loads(call(capsys, *words)[1])["plan"]
    words = ["estimate", *JOB, "--json", "--sequence-parallel"]
    words += ["--activation-checkpointing", "selective"]
    for name, value in pins.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    answer: dict[str, Any] = json.loads(call(capsys, *words)[1])
    if [stage["last_layer"] for stage in head["stages"]] == [15, 31]:
        assert answer["step_s"] == pytest.approx(head["step_s"], rel=1e-9)
    assert head["step_s"] <= answer["step_s"] * (1 + 1e-9)
    assert set(answer) >= {"step_s", "tokens_per_s_per_gpu", "peak_bytes", "breakdown_s", "memory"}
    assert len(answer["memory"]) == len(answer["peak_bytes"]) == 2
    keys = {"parameters", "gradients", "optimizer", "activations", "workspace", "overhead"}
    assert set(answer["memory"][0]) == keys


def test_estimate_refuses_degrees_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", *JOB, "--zero-stage", "0", "--tp", "2", "--pp", "1"]
    status, _, err = call(capsys, *words, "--dp", "2", "--micro-batch-size", "1")
    assert status == 1
    assert "4 ranks, the cluster has 8 devices" in err
    status, _, err = call(capsys, *words, "--dp", "4", "--micro-batch-size", "5")
    assert status == 1
    assert "does not divide the global batch" in err


def test_planning_imports_no_heavy_package() -> None:
    heavy = (
        "('torch', 'transformers', 'deepspeed', 'megatron', 'pydantic', 'rich', 'numpy', 'pulp')"
    )
    code = (
        "import sys, io, contextlib\n"
        "from ds_autoplan.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    status = main({['plan', *JOB, '--json']!r})\n"
        f"print(status, [name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "0 []"


def test_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_autoplan", "plan", "--model", "nope", *JOB[2:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "There is no model 'nope'" in done.stderr


def test_proof_prints_json_only() -> None:
    """HiGHS prints a banner of its own; it must not reach standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "ds_autoplan", "plan", *JOB, "--json", "--prove"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert json.loads(done.stdout)["plan"]["report"]["proof"]["status"] == "optimal"


JOB_70B = (
    "--model llama-3-70b --cluster 8x8xH100-SXM-80GB --seq-length 8192 --global-batch-size 1024"
).split()


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ("--tp 8 --pp 4 --dp 2 --zero-stage 1 --vpp 5", ["interleaved"]),
        ("--tp 4 --pp 2 --dp 8 --zero-stage 3", ["ZeRO stages 0 and 1 only"]),
        ("--tp 4 --pp 2 --dp 8 --zero-stage 0", ["16-bit gradient norm"]),
    ],
)
def test_estimate_names_only_what_excludes_the_setting(
    options: str, reasons: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["estimate", *JOB_70B, *options.split(), "--micro-batch-size", "1", "--json"]
    assert main(command) == 0
    excluded = json.loads(capsys.readouterr().out)["excluded"]
    assert len(excluded) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, excluded, strict=True))


@pytest.mark.parametrize(("tp", "fits"), [("8", True), ("1", False)])
def test_estimate_says_whether_the_setting_fits(
    tp: str, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees = ["--tp", tp, "--pp", "1", "--dp", str(64 // int(tp)), "--zero-stage", "1"]
    more = ["--micro-batch-size", "1", "--sequence-parallel", "--activation-checkpointing", "full"]
    assert main(["estimate", *JOB_70B, *degrees, *more, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is fits is (min(answer["margin_bytes"]) >= 0)
    assert answer["capacity_bytes"] - answer["peak_bytes"][0] == answer["margin_bytes"][0]
    assert main(["estimate", *JOB_70B, *degrees, *more]) == 0
    assert ("Does not fit" in capsys.readouterr().out) is not fits


def test_the_accumulation_that_was_priced_is_the_one_that_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *JOB_70B, "--gradient-accumulation-steps", "4", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["plan"]["deepspeed"]
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["train_micro_batch_size_per_gpu"] * 4 * 64 == settings["train_batch_size"]
    command = ["plan", *JOB_70B, "--gradient-accumulation-steps", "4", "--backend", "megatron"]
    assert main(command) == 2
    assert "Leave it out" in capsys.readouterr().err


def test_what_is_nearest_to_fitting_lacks_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    job = [*JOB_70B[:2], "--cluster", "1x1xH100-SXM-80GB", *JOB_70B[4:6]]
    assert main(["plan", *job, "--global-batch-size", "16"]) == 1
    found = re.search(r": ([0-9.]+) GB per device too many", capsys.readouterr().err)
    # 70.6 billion parameters: 16 bytes of states each, or what is left of them.
    assert found is not None and float(found.group(1)) > 900


def test_a_range_is_shown_with_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *JOB_70B, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    low, high = plan["report"]["range_s"]
    assert low < plan["step_s"] < high
    assert main(["plan", *JOB_70B, "--backend", "megatron"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Step [0-9.]+ s \([0-9.]+ s to [0-9.]+ s\)", shown)
    assert "export PLAN.json --to megatron" in shown and "DeepSpeed settings" not in shown
