"""Prints what .venv lacks of pyproject.toml's requirements: `venv.py [EXTRA ...]`, one per line.

Runs in the interpreter of .venv, so that what is already there, however it came, is left alone.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tomllib
from pip._vendor.packaging.requirements import Requirement


def is_met(text: str) -> bool:
    requirement = Requirement(text)
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    if sys.argv[1:] == ["--model"]:
        wanted = [project["tool"]["orlop"]["demo-model"]]
    else:
        for extra in sys.argv[1:]:
            wanted += project["project"]["optional-dependencies"][extra]
    print("\n".join(text for text in dict.fromkeys(wanted) if not is_met(text)))


main()
