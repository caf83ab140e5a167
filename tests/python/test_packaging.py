"""The installed package: `pip install .` gives the module and the command, on their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiler_of_the_build() -> dict[str, str]:
    """The compiler of build/ by the name it has there, which is part of what ccache knows objects by."""
    cache = ROOT / "build" / "CMakeCache.txt"
    if not cache.exists():
        return {}
    for line in cache.read_text(encoding="utf-8").splitlines():
        if line.startswith("CMAKE_CXX_COMPILER:"):
            return {"CXX": line.partition("=")[2]}
    return {}


@pytest.mark.packaging
def test_pip_install_gives_module_and_command(tmp_path):
    pytest.importorskip("scikit_build_core")
    target = tmp_path / "site"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if shutil.which("ccache"):  # without the folder in the hash, objects of the other build trees fit
        environment |= {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_NOHASHDIR": "1"}
        environment |= compiler_of_the_build()
    install = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-build-isolation",
            "--no-deps",
            "--no-index",
            "--target",
            target,
            f"-Cbuild-dir={ROOT / 'build-wheel'}",
            "-Ccmake.define.ORLOP_CUDA=OFF",
            ROOT,
        ],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert install.returncode == 0, install.stdout + install.stderr
    package = target / "orlop"
    assert sorted(p.name for p in package.glob("*.so*"))
    assert not (target / "include").exists()
    environment["PYTHONPATH"] = str(target)
    result = subprocess.run(
        [target / "bin" / "orlop", "--version"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("orlop 0.")
    result = subprocess.run(
        [sys.executable, "-c", "import orlop; print(orlop.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.stdout.strip() == str(package / "__init__.py")
