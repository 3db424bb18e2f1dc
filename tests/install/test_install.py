"""Every kind of installation, each in a virtual environment of its own.

The wheels are built from a copy of the sources, so a build folder left in the checkout changes
nothing. The environments borrow the packages of the running Python through a path file, so nothing
is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK_FILE = "ds_autoplan_hook.pth"
SOURCES = ["ds_autoplan", "integrations", "_ds_autoplan_hook.py", HOOK_FILE, "setup.py"]
SOURCES += ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt", "Makefile"]
KINDS = ["wheel", "sdist", "editable"]


def clean_environment(**extra: str) -> dict[str, str]:
    ours = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "DS_AUTOPLAN")
    return {**{k: v for k, v in os.environ.items() if k not in ours}, **extra}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean_environment(**env),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def build(what: str, source: Path, into: Path) -> Path:
    """Call the build backend as pip does, in `source`; returns the file it made."""
    into.mkdir()
    code = f"from setuptools.build_meta import build_{what} as b; b({str(into)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target / name)
    return target


@pytest.fixture(scope="module")
def wheels(source, tmp_path_factory) -> dict[str, Path]:
    """The wheel of each kind of installation; `sdist` is built from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("wheels")
    sdist = build("sdist", source, folder / "archive")
    run("tar", "xzf", sdist, cwd=folder)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    return {
        "wheel": build("wheel", source, folder / "wheel"),
        "sdist": build("wheel", unpacked, folder / "sdist"),
        "editable": build("editable", source, folder / "editable"),
    }


class Environment:
    """A virtual environment that sees the packages of the running Python, after its own."""

    def __init__(self, folder: Path, wheel: Path | None) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.python = folder / "bin" / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = Path(self.run(code))
        if wheel is not None:
            pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
            run(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
        borrowed = sysconfig.get_path("purelib")
        (self.packages / "zz_borrowed.pth").write_text(borrowed + "\n")

    def run(self, code: str, cwd: Path | None = None, **env: str) -> str:
        """What `code` prints."""
        return run(self.python, "-c", code, cwd=cwd or self.folder, **env)


@pytest.fixture(scope="module")
def environments(wheels, tmp_path_factory) -> dict[str, Environment]:
    """One for each kind, and a bare one without the package."""
    folder = tmp_path_factory.mktemp("environments")
    made = {kind: Environment(folder / kind, wheel) for kind, wheel in wheels.items()}
    return {**made, "bare": Environment(folder / "bare", None)}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def environment(kind, environments) -> Environment:
    return environments[kind]


def packaged(source: Path) -> set[str]:
    """The files a wheel must hold: Python, JSON and templates, under their installed names."""
    places = {"ds_autoplan": "ds_autoplan", "integrations": "ds_autoplan/integrations"}
    files = {"_ds_autoplan_hook.py", HOOK_FILE, "ds_autoplan/py.typed"}
    for folder, installed in places.items():
        for suffix in ("*.py", "*.json", "*.j2"):
            for path in (source / folder).rglob(suffix):
                files.add(f"{installed}/{path.relative_to(source / folder).as_posix()}")
    return files


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_wheel_holds_every_file_and_nothing_else(wheels, source, kind):
    with zipfile.ZipFile(wheels[kind]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == packaged(source)


def test_editable_wheel_holds_only_the_path_file(wheels, source):
    with zipfile.ZipFile(wheels["editable"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        text = archive.read(HOOK_FILE).decode()
        record = next(n for n in archive.namelist() if n.endswith("/RECORD"))
        recorded = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
        assert recorded == set(archive.namelist())
    assert names == {HOOK_FILE}
    assert text == f"{source}\n{(source / HOOK_FILE).read_text()}"


def test_hook_is_installed_and_active(environment):
    assert (environment.packages / HOOK_FILE).is_file()
    code = "import sys; print(type(sys.meta_path[0]).__name__)"
    assert environment.run(code) == "DeepSpeedFinder"


def test_environment_turns_it_off(environment):
    code = "import sys; print('DeepSpeedFinder' in [type(f).__name__ for f in sys.meta_path])"
    assert environment.run(code) == "True"
    assert environment.run(code, DS_AUTOPLAN="0") == "False"


def test_import_of_deepspeed_is_wrapped(environment, tmp_path):
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("def initialize(config=None): return 'own'\n")
    code = (
        "import sys; from deepspeed import initialize as f\n"
        "print(f({'train_batch_size': 1}), hasattr(f, '__wrapped__'),"
        " any(m.startswith('ds_autoplan.integrations') for m in sys.modules))"
    )
    assert environment.run(code, PYTHONPATH=str(tmp_path)) == "own True False"


def test_start_imports_nothing_but_the_hook(environment, environments):
    code = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    started, bare = json.loads(environment.run(code)), json.loads(environments["bare"].run(code))
    assert set(started) - set(bare) == {"_ds_autoplan_hook"}
    assert set(bare) - set(started) == set()


def test_start_costs_less_than_a_small_import(environment):
    """Against `import json`, itself a few milliseconds, in the same process; the best of seven."""
    line = (environment.packages / HOOK_FILE).read_text().splitlines()[-1]
    code = (
        "import sys, time\n"
        "del sys.modules['_ds_autoplan_hook'], sys.meta_path[0]\n"
        f"a = time.perf_counter()\n{line}\nb = time.perf_counter()\n"
        "import json\nc = time.perf_counter()\n"
        "assert '_ds_autoplan_hook' in sys.modules\nprint(b - a, c - b)"
    )
    times = [tuple(map(float, environment.run(code).split())) for _ in range(7)]
    assert min(t[0] for t in times) < 0.5 * min(t[1] for t in times)


def test_package_is_importable_from_anywhere(environment, source, kind, tmp_path):
    code = (
        "import ds_autoplan; from importlib.util import find_spec\n"
        "spec = find_spec('ds_autoplan.integrations.megatron')\n"
        "print(ds_autoplan.__file__, spec.origin, sep='\\n')"
    )
    package, megatron = map(Path, environment.run(code, cwd=tmp_path).splitlines())
    root = source if kind == "editable" else environment.packages
    folder = "integrations" if kind == "editable" else "ds_autoplan/integrations"
    assert package == root / "ds_autoplan" / "__init__.py"
    assert megatron == root / folder / "megatron" / "__init__.py"


def test_package_is_importable_in_the_checkouts_root(environment, source):
    """There Python finds ./ds_autoplan first, which has no folder `integrations` inside."""
    code = (
        "import ds_autoplan; from importlib.util import find_spec\n"
        "spec = find_spec('ds_autoplan.integrations.megatron')\n"
        "print(ds_autoplan.__file__, spec.origin, sep='\\n')"
    )
    package, megatron = map(Path, environment.run(code, cwd=source).splitlines())
    assert package == source / "ds_autoplan" / "__init__.py"
    assert megatron == source / "integrations" / "megatron" / "__init__.py"


def test_console_script_and_metadata(environment):
    assert os.access(environment.folder / "bin" / "ds-autoplan", os.X_OK)
    code = (
        "from importlib.metadata import distribution as d; x = d('ds_autoplan')\n"
        "import ds_autoplan; print(x.version == ds_autoplan.__version__, *x.entry_points)"
    )
    printed = environment.run(code)
    assert printed.startswith("True ") and "ds_autoplan.cli:main" in printed


def test_left_behind_or_broken_files_are_silent(environments, tmp_path):
    """The hook file stays harmless in a Python whose package was deleted by hand, or broke."""
    bare = environments["bare"]
    hook = bare.packages / HOOK_FILE
    broken = bare.packages / "_ds_autoplan_hook.py"
    try:
        shutil.copy(ROOT / HOOK_FILE, hook)
        for text in (None, "1 +", "import absent", "1 / 0"):
            if text is not None:
                broken.write_text(text)
            done = subprocess.run(
                [bare.python, "-c", "print('runs')"],
                cwd=tmp_path,
                env=clean_environment(),
                capture_output=True,
                text=True,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", ""), text
    finally:
        hook.unlink()
        broken.unlink(missing_ok=True)
