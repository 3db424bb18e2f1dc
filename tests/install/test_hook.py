"""The hook's two halves: what `deepspeed.initialize` becomes, and how it gets there."""

from __future__ import annotations

import base64
import inspect
import json
import os
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path

import pytest

from ds_autoplan import hook

ROOT = Path(__file__).resolve().parents[2]
HOOK_LINE = (ROOT / "ds_autoplan_hook.pth").read_text()
LAUNCH = "ds_autoplan.integrations.deepspeed.launch"

# The parameters of deepspeed.initialize (0.19.8), with a body that tells what it was given.
FAKE_DEEPSPEED = """
def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None,
               lr_scheduler=None, distributed_port=29500, mpu=None, dist_init_required=None,
               collate_fn=None, config=None, mesh_param=None, config_params=None):
    "DeepSpeed's own."
    return "own", dict(locals())
"""


@pytest.fixture
def original():
    namespace: dict = {}
    exec(FAKE_DEEPSPEED, namespace)
    return namespace["initialize"]


@pytest.fixture
def wrapped(original, monkeypatch):
    """The wrapper, with a planner that only tells what it was given."""
    launch = types.ModuleType(LAUNCH)
    launch.initialize = lambda original, **arguments: ("planned", original, arguments)
    monkeypatch.setitem(sys.modules, LAUNCH, launch)
    monkeypatch.delenv("DS_AUTOPLAN", raising=False)
    return hook.wrap(original)


def as_path(text: str, tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(text)
    return str(path)


def as_base64(text: str, tmp_path: Path) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def as_dict(text: str, tmp_path: Path) -> dict:
    return hook.parse_config(text)


WAYS = {
    "config": lambda config: {"config": config},
    "config_params": lambda config: {"config_params": config},
    "deepspeed_config": lambda config: {"args": Namespace(deepspeed_config=config)},
    "deepscale_config": lambda config: {
        "args": Namespace(deepspeed_config=None, deepscale_config=config)
    },
    "config beside empty args": lambda config: {
        "args": Namespace(deepspeed_config=None),
        "config": config,
    },
}


@pytest.mark.parametrize("form", [as_path, as_base64, as_dict])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("text", "on"),
    [
        ('{"autoplan": true}', True),
        ('{"train_batch_size": 4, "autoplan": {"tp": 2}}', True),
        ('{"autoplan": {}}', True),
        ('{"autoplan": "yes"}', True),  # not valid, but for the planner to say
        ('{ # DeepSpeed reads Hjson\n "autoplan": true}', True),
        ('{"autoplan": false}', False),
        ('{"autoplan": null}', False),
        ('{"train_batch_size": 4}', False),
        ('{"wandb": {"project": "autoplan"}}', False),
        ('{"wandb": {"autoplan": true}}', False),
    ],
)
def test_key_decides(wrapped, original, tmp_path, text, on, way, form):
    given = WAYS[way](form(text, tmp_path))
    answer = wrapped(model="m", **given)
    if on:
        kind, function, arguments = answer
        assert (kind, function) == ("planned", original)
        assert arguments == original(model="m", **given)[1]  # every parameter, defaults included
    else:
        assert answer == ("own", original(model="m", **given)[1])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"config": 5},
        {"config": Path("ds.json")},
        {"config": "absent.json"},
        {"config": base64.urlsafe_b64encode(b"\xff autoplan").decode()},
        {"config": base64.urlsafe_b64encode(b'{"autoplan": true').decode()},
        {"config": base64.urlsafe_b64encode(b'{"autoplan": true, "autoplan": true}').decode()},
        {"config": {"autoplan": True}, "args": Namespace(deepspeed_config={"autoplan": True})},
    ],
    ids=str,
)
def test_what_deepspeed_refuses_is_left_to_deepspeed(wrapped, original, given):
    assert wrapped(model="m", **given) == ("own", original(model="m", **given)[1])


def test_positional_arguments_arrive_as_named(wrapped):
    args = Namespace(deepspeed_config={"autoplan": True})
    _, _, arguments = wrapped(args, "m", "optimizer")
    assert (arguments["args"], arguments["model"], arguments["optimizer"]) == (
        args,
        "m",
        "optimizer",
    )


def test_a_call_that_does_not_fit_gets_deepspeeds_own_error(wrapped):
    with pytest.raises(TypeError, match="initialize.. got an unexpected keyword argument 'modle'"):
        wrapped(modle="m", config={"autoplan": True})


def test_switched_off_by_the_environment_after_wrapping(wrapped, monkeypatch):
    monkeypatch.setenv("DS_AUTOPLAN", "0")
    assert wrapped(config={"autoplan": True})[0] == "own"


def test_wrapper_looks_like_the_original(wrapped, original):
    assert inspect.signature(wrapped) == inspect.signature(original)
    assert (wrapped.__name__, wrapped.__doc__) == (original.__name__, original.__doc__)
    assert wrapped.__wrapped__ is original


def test_wrapped_once(original):
    module = types.ModuleType("deepspeed")
    module.initialize = original
    hook.wrap_module(module)
    first = module.initialize
    hook.wrap_module(module)
    assert module.initialize is first and first.__wrapped__ is original


# Imports, each in a Python of its own.


@pytest.fixture
def fake(tmp_path):
    """A folder with a package `deepspeed`."""
    package = tmp_path / "fake" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_DEEPSPEED)
    (package / "comm.py").write_text("")
    return package.parent


def run(code: str, *paths: Path, **env: str) -> str:
    """What `code` prints in a new Python with `paths` first on its path; stderr must be empty."""
    kept = {k: v for k, v in os.environ.items() if k != "DS_AUTOPLAN"}
    kept["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **env}, capture_output=True, text=True, cwd="/"
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize(
    "use",
    [
        "from deepspeed import initialize as f",
        "import deepspeed; f = deepspeed.initialize",
        "import deepspeed.comm, deepspeed; f = deepspeed.initialize",
        "import pkgutil; pkgutil.resolve_name('deepspeed'); from deepspeed import initialize as f",
        "import deepspeed, importlib; f = importlib.reload(deepspeed).initialize",
        "import deepspeed; del sys.modules['deepspeed']; from deepspeed import initialize as f",
        "import ds_autoplan; from deepspeed import initialize as f",
    ],
)
def test_every_import_gets_the_wrapper(fake, use):
    code = (
        f"{HOOK_LINE}\n{use}\nprint(hasattr(f, '__wrapped__'), 'ds_autoplan.plan' in sys.modules)"
    )
    assert run(code, ROOT, fake) == "True False"


def test_loader_keeps_its_type_and_source(fake):
    code = (
        f"{HOOK_LINE}\nimport deepspeed, inspect\nsource = inspect.getsource(deepspeed)\n"
        "print(type(deepspeed.__loader__).__name__, 'return \"own\"' in source)"
    )
    assert run(code, ROOT, fake) == "SourceFileLoader True"


def test_looking_for_deepspeed_before_importing_it(fake):
    """As transformers and accelerate do, to know whether it is there."""
    code = (
        f"{HOOK_LINE}\nfrom importlib.util import find_spec\nassert find_spec('deepspeed')\n"
        "import deepspeed; print(hasattr(deepspeed.initialize, '__wrapped__'))"
    )
    assert run(code, ROOT, fake) == "True"


@pytest.mark.parametrize("first", ["deepspeed", "ds_autoplan"])
def test_importing_the_package_is_enough(fake, first):
    code = (
        f"import {first}, ds_autoplan, deepspeed; print(deepspeed.initialize.__wrapped__.__name__)"
    )
    assert run(code, ROOT, fake) == "initialize"


def test_initialize_of_the_package_is_deepspeeds(fake):
    code = "import ds_autoplan; print(ds_autoplan.initialize(model='m', config={})[0])"
    assert run(code, ROOT, fake) == "own"


@pytest.mark.parametrize("start", [HOOK_LINE, "import ds_autoplan"])
def test_environment_turns_it_off(fake, start):
    code = f"{start}\nimport deepspeed as d; print(hasattr(d.initialize, '__wrapped__'))"
    assert run(code, ROOT, fake, DS_AUTOPLAN="0") == "False"
    assert run(code, ROOT, fake, DS_AUTOPLAN="1") == "True"


def test_other_modules_of_a_zip_file_are_left_alone(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("deepspeed.py", FAKE_DEEPSPEED)
        archive.writestr("other.py", FAKE_DEEPSPEED)
    code = (
        f"{HOOK_LINE}\nimport deepspeed, other\n"
        "print(*[hasattr(m.initialize, '__wrapped__') for m in (deepspeed, other)])"
    )
    assert run(code, ROOT, tmp_path / "all.zip") == "True False"


def test_hook_file_left_behind_is_silent(fake):
    code = f"{HOOK_LINE}\nimport deepspeed; print(deepspeed.initialize()[0])"
    assert run(code, fake) == "own"  # nothing of ours on the path


def test_hook_without_its_package_is_silent(fake):
    (fake / "_ds_autoplan_hook.py").write_text((ROOT / "_ds_autoplan_hook.py").read_text())
    code = f"{HOOK_LINE}\nimport deepspeed; print(deepspeed.initialize()[0])"
    assert run(code, fake) == "own"


def test_broken_hook_is_silent(fake):
    (fake / "_ds_autoplan_hook.py").write_text("1 +")
    assert run(f"{HOOK_LINE}\nimport deepspeed; print(deepspeed.initialize()[0])", fake) == "own"


def test_broken_package_warns_a_deepspeed_job_and_lets_it_run(fake):
    (fake / "_ds_autoplan_hook.py").write_text((ROOT / "_ds_autoplan_hook.py").read_text())
    (fake / "ds_autoplan.py").write_text("1 +")
    code = (
        "import io\nsys_err = io.StringIO()\nimport sys\nsys.stderr = sys_err\n"
        f"{HOOK_LINE}\nimport deepspeed\nprint(deepspeed.initialize()[0], sys_err.getvalue())"
    )
    printed = run(code, fake)
    assert printed.startswith("own ds_autoplan is broken, deepspeed runs without it: SyntaxError(")


REAL_JOB = """
import json, os, sys
deepspeed_hook = sys.argv[1] == "hook"
if deepspeed_hook:
    exec(sys.argv[2])
import torch, deepspeed
from deepspeed import initialize
import inspect
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
told = {"wrapped": hasattr(initialize, "__wrapped__"), "runs": [],
        "parameters": list(inspect.signature(initialize).parameters)}
base = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
for extra in ({}, {"autoplan": False}, {"autoplan": None}):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    answer = initialize(model=model, model_parameters=model.parameters(), config={**base, **extra})
    engine = answer[0]
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 3)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    told["runs"].append([[f"{type(a).__module__}.{type(a).__name__}" for a in answer], losses])
told["ours"] = sorted(m for m in sys.modules if m.startswith("ds_autoplan.integrations"))
print("\\n" + json.dumps(told))
"""


def test_a_job_without_the_key_is_deepspeeds_own(tmp_path, free_port):
    told = {}
    for mode in ("hook", "plain"):
        env = {k: v for k, v in os.environ.items() if k != "DS_AUTOPLAN"}
        env |= {"PYTHONPATH": str(ROOT), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "DS_ACCELERATOR": "cpu"}
        if mode == "plain":
            env["DS_AUTOPLAN"] = "0"
        done = subprocess.run(
            [sys.executable, "-c", REAL_JOB, mode, HOOK_LINE],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        told[mode] = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["hook"].pop("wrapped") is True
    assert told["plain"].pop("wrapped") is False
    assert told["hook"] == told["plain"]  # types, losses to the bit, nothing of ours imported
    assert told["hook"]["ours"] == []
    namespace: dict = {}
    exec(FAKE_DEEPSPEED, namespace)
    assert told["hook"]["parameters"] == list(inspect.signature(namespace["initialize"]).parameters)
    losses = told["hook"]["runs"][0][1]
    assert losses[0] > losses[-1]
    assert told["hook"]["runs"][1:] == [told["hook"]["runs"][0]] * 2


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
