"""`ds-autoplan doctor`: does what planning and training need work here, and if not, what to do.

Each check looks at one thing and answers with a :class:`Finding`; none changes anything. What takes
seconds (a pair of processes that exchange a tensor) runs last.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 13)
STALE_LOCK_S = 600.0  # a build of DeepSpeed's operators takes minutes
SHARED_MEMORY_BYTES = 2**30
PAIR_LIMIT_S = 120.0
PROBLEM, WARNING, OK = "problem", "warning", "ok"


@dataclass(frozen=True)
class Finding:
    """What a check found: `status` is "ok", "warning" or "problem"; a remedy where not ok."""

    check: str
    status: str
    detail: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


def python_version(version: tuple[int, int] | None = None) -> Iterator[Finding]:
    """The interpreter's version."""
    major, minor = version or sys.version_info[:2]
    text = f"Python {major}.{minor}"
    if OLDEST <= (major, minor) <= NEWEST:
        yield Finding("python", OK, text)
    else:
        wanted = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        yield Finding("python", WARNING, text, f"Tested are {wanted}.")


def packages() -> Iterator[Finding]:
    """The packages that this one needs, in the versions that it needs."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in metadata.requires("ds_autoplan") or ()]
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages",
            WARNING,
            "ds_autoplan runs from its sources, so its requirements are not known",
            "Install it: pip install -e .",
        )
        return
    for item in needed:
        if item.marker is not None and not item.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(item.name)
        except metadata.PackageNotFoundError:
            yield Finding(
                item.name, PROBLEM, "is not installed", f'pip install "{item.name}{item.specifier}"'
            )
            continue
        if item.specifier.contains(found, prereleases=True):
            yield Finding(item.name, OK, found)
        else:
            yield Finding(
                item.name,
                PROBLEM,
                f"{found} is installed; needed is {item.specifier}",
                f'pip install "{item.name}{item.specifier}"',
            )


def hook(environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Whether a fresh interpreter watches for the import of deepspeed."""
    env = dict(os.environ if environment is None else environment)
    if env.get("DS_AUTOPLAN") == "0":
        yield Finding(
            "hook",
            WARNING,
            'DS_AUTOPLAN=0 is set: "autoplan" in a config does nothing',
            "Unset DS_AUTOPLAN.",
        )
        return
    code = "import sys; print(any(type(f).__name__ == 'DeepSpeedFinder' for f in sys.meta_path))"
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
        )
    if answer.stdout.strip() == "True":
        yield Finding("hook", OK, "every Python process watches for deepspeed")
    else:
        yield Finding(
            "hook",
            PROBLEM,
            "the .pth file is not read, so unchanged scripts are not planned",
            "Install the package again, or put `import ds_autoplan` into the script.",
        )


def integrations() -> Iterator[Finding]:
    """Whether the package that is imported is whole."""
    if find_spec("ds_autoplan.integrations") is not None:
        yield Finding("integrations", OK, "found")
        return
    import ds_autoplan

    yield Finding(
        "integrations",
        PROBLEM,
        f"{Path(ds_autoplan.__file__).parent} is imported, which has no integrations",
        "Start Python elsewhere, or install the checkout with pip install -e .",
    )


def solver() -> Iterator[Finding]:
    """Whether HiGHS solves through PuLP: the smallest integer program with a known answer."""
    import pulp

    from ds_autoplan.search.ilp import run_highs

    problem = pulp.LpProblem("doctor", pulp.LpMaximize)
    x, y = (problem.add_variable(name, 0, 10, "Integer") for name in "xy")
    problem += 3 * x + 2 * y
    problem += 2 * x + y <= 7
    problem += x + 3 * y <= 9
    try:
        run_highs(problem, pulp.HiGHS(msg=False, threads=1), os.devnull)
    except Exception as error:  # whatever the solver's binding raises
        yield Finding("solver", PROBLEM, f"HiGHS does not run: {error}", "pip install highspy")
        return
    value = pulp.value(problem.objective)
    if value is not None and abs(value - 11.0) < 1e-6:
        yield Finding("solver", OK, "HiGHS through PuLP")
    else:
        yield Finding("solver", PROBLEM, f"HiGHS answers {value}, not 11", "pip install -U highspy")


def devices() -> Iterator[Finding]:
    """GPUs by name and their links, or the processor."""
    import torch

    if not torch.cuda.is_available():
        cores = os.cpu_count() or 1
        yield Finding("devices", OK, f"no GPU, {cores} cores; torch {torch.__version__}")
        return
    from ds_autoplan.integrations.calibration.measure import known_gpu

    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    name = known_gpu()
    if name:
        yield Finding("devices", OK, f"{found}, planned as {name}")
    else:
        yield Finding(
            "devices",
            WARNING,
            f"{found}, which is not known",
            "Measure it: ds-autoplan calibrate --out cluster.json",
        )
    if torch.cuda.device_count() > 1:
        yield _links()


def _links() -> Finding:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("links", WARNING, "nvidia-smi is missing, so links are not known", "")
    matrix = subprocess.run([command, "topo", "-m"], capture_output=True, text=True).stdout
    if re.search(r"\bNV\d+\b", matrix):
        return Finding("links", OK, "NVLink between GPUs")
    return Finding(
        "links",
        WARNING,
        "PCIe link detected: GPUs are not joined by NVLink",
        "Plans for NVLink nodes do not hold here; name a PCIe device, or calibrate.",
    )


def extensions(folder: Path | None = None, now: float | None = None) -> Iterator[Finding]:
    """Locks that a killed build of DeepSpeed's operators left: later runs wait for them."""
    root = folder or _extensions_folder()
    locks = sorted(root.glob("**/lock")) if root.is_dir() else []
    old = [lock for lock in locks if (now or time.time()) - lock.stat().st_mtime > STALE_LOCK_S]
    if old:
        yield Finding(
            "extensions",
            PROBLEM,
            f"a build that did not end left {', '.join(map(str, old))}",
            "If nothing is being built, delete it: every run hangs in init_distributed until then.",
        )
    elif locks:
        yield Finding(
            "extensions",
            WARNING,
            f"a build seems to run: {', '.join(map(str, locks))}",
            "Wait for it to end.",
        )
    else:
        yield Finding("extensions", OK, f"no lock in {root}")
    if shutil.which("ninja") is None:
        yield Finding(
            "compiler",
            WARNING,
            "ninja is missing: DeepSpeed cannot compile operators",
            'pip install ninja, or use "torch_adam": true on CPUs.',
        )


def _extensions_folder() -> Path:
    stated = os.environ.get("TORCH_EXTENSIONS_DIR")
    if stated:
        return Path(stated)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions"


def shared_memory() -> Iterator[Finding]:
    """Room in /dev/shm, through which the processes of a node exchange tensors."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    if free >= SHARED_MEMORY_BYTES:
        yield Finding("shared memory", OK, f"{free / 2**30:.1f} GiB free")
    else:
        yield Finding(
            "shared memory",
            WARNING,
            f"{free / 2**20:.0f} MiB free in {folder}",
            "Start the container with more (docker: --shm-size=8g).",
        )


def pair_of_processes() -> Iterator[Finding]:
    """Two processes of this machine that reduce a tensor."""
    from ds_autoplan.errors import AutoplanError
    from ds_autoplan.integrations.calibration.local import exchange

    start = time.monotonic()
    try:
        exchange(2, PAIR_LIMIT_S)
    except AutoplanError as error:
        yield Finding(
            "processes",
            PROBLEM,
            str(error),
            "Look for a firewall on the loopback interface, or set GLOO_SOCKET_IFNAME=lo.",
        )
    else:
        took = time.monotonic() - start
        yield Finding("processes", OK, f"two processes exchanged a tensor in {took:.1f} s")


def config(path: str) -> Iterator[Finding]:
    """A DeepSpeed JSON: can it be read, and does it ask for a plan."""
    from ds_autoplan.config import parse_autoplan
    from ds_autoplan.errors import BadInputError
    from ds_autoplan.hook import KEY, parse_config
    from ds_autoplan.plan import Plan
    from ds_autoplan.reading import read_text

    try:
        read = parse_config(read_text(path, "DeepSpeed config"))
        if not isinstance(read, dict):
            raise BadInputError("It is not an object.")
        asked = parse_autoplan(read.get(KEY))
        if asked is not None and asked.plan:
            Plan.load(asked.plan)
    except (BadInputError, ValueError) as error:
        yield Finding("config", PROBLEM, f"{path}: {error}", "Mend the file.")
        return
    if asked is None:
        yield Finding("config", WARNING, f"{path} does not ask for a plan", 'Add "autoplan": true.')
    else:
        yield Finding("config", OK, f"{path} asks for a plan")


CHECKS: tuple[Check, ...] = (
    python_version,
    packages,
    integrations,
    hook,
    solver,
    devices,
    extensions,
    shared_memory,
    pair_of_processes,
)


def examine(config_path: str | None = None) -> Iterator[Finding]:
    """All findings, each as soon as it is known; a check that breaks is a finding too."""
    checks: list[tuple[str, Check]] = [(check.__name__, check) for check in CHECKS]
    if config_path is not None:
        path = config_path
        checks.insert(0, ("config", lambda: config(path)))
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # the point is to go on and tell
            yield Finding(
                name.replace("_", " "),
                PROBLEM,
                f"the check broke: {type(error).__name__}: {error}",
                "The packages above may be missing or broken.",
            )
