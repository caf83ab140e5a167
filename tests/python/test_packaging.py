"""The installed package: `pip install .` gives the module and the command, on their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# What ccache knows objects by: where all of it is that of build/, its objects serve the wheel.
OF_THE_BUILD = ("CMAKE_CXX_COMPILER", "CMAKE_CXX_FLAGS_RELWITHDEBINFO", "ORLOP_PRECOMPILE")


def settings_of_the_build() -> dict[str, str]:
    cache = ROOT / "build" / "CMakeCache.txt"
    lines = cache.read_text(encoding="utf-8").splitlines() if cache.exists() else []
    known = {line.partition(":")[0]: line.partition("=")[2] for line in lines}
    return {name: known[name] for name in OF_THE_BUILD if name in known}


@pytest.mark.packaging
def test_pip_install_gives_module_and_command(tmp_path):
    pytest.importorskip("scikit_build_core")
    target = tmp_path / "site"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    settings: dict[str, str] = {}
    if shutil.which("ccache"):  # without the folder in the hash, objects of the other build trees fit
        environment |= {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_NOHASHDIR": "1"}
        settings = settings_of_the_build()
        if compiler := settings.pop("CMAKE_CXX_COMPILER", None):
            environment["CXX"] = compiler
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
            *[f"-Ccmake.define.{name}={value}" for name, value in settings.items()],
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
