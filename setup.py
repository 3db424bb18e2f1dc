"""Packages, and the `.pth` file that starts the hook, for every kind of installation.

Everything static is in pyproject.toml. Here is what it cannot say: the packages under
`integrations/` are installed as `ds_autoplan.integrations`, and `ds_autoplan_hook.pth` goes to the
root of site-packages, from wheels (and so from source distributions) and editable wheels alike.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
HOOK = "ds_autoplan_hook.pth"


class BuildPy(build_py):
    """Also copies the hook file, beside the packages."""

    def run(self) -> None:
        """Copy the packages, then the hook file."""
        super().run()
        if not self.editable_mode:
            self.copy_file(str(ROOT / HOOK), str(Path(self.build_lib) / HOOK))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files that `run` makes."""
        hook = [] if self.editable_mode else [str(Path(self.build_lib) / HOOK)]
        return [*super().get_outputs(include_bytecode), *hook]


class EditableWheel(editable_wheel):
    """An editable wheel that holds one `.pth` file: the checkout's path, then the hook's line.

    It takes the place of the import finder that setuptools generates: that one imports pathlib at
    each start of Python, over ten times what the hook may cost.
    """

    def run(self) -> None:
        """Let setuptools build the wheel, then exchange what it puts on the path."""
        super().run()
        for wheel in Path(self.dist_dir).glob("ds_autoplan-*editable*.whl"):
            _exchange_path_files(wheel, f"{ROOT}\n{(ROOT / HOOK).read_text()}")


def _exchange_path_files(wheel: Path, path_file: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    files = {n: data for n, data in files.items() if not n.startswith("__editable__")}
    files = {HOOK: path_file.encode(), **files}
    del files[record]
    lines = [f"{name},{_digest(data)},{len(data)}\n" for name, data in files.items()]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


setup(
    packages=[
        *find_packages(include=["ds_autoplan", "ds_autoplan.*"]),
        "ds_autoplan.integrations",
        *(f"ds_autoplan.integrations.{name}" for name in find_packages("integrations")),
    ],
    py_modules=["_ds_autoplan_hook"],
    package_dir={"ds_autoplan.integrations": "integrations"},
    package_data={"": ["*.json", "**/*.json", "*.j2", "py.typed"]},
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
)
