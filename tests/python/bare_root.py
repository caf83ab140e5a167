"""A root folder like that of the smallest container: glibc, the C++ runtime, this Python, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

# What PEP 600 lets a wheel take from every Linux with glibc, and what Python's own modules need.
OF_EVERY_LINUX = {
    "ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0",
    "libresolv.so.2", "librt.so.1", "libstdc++.so.6", "libutil.so.1",
}  # fmt: skip
OF_PYTHON = {
    "libbz2.so.1.0", "libcrypt.so.1", "libcrypto.so.3", "libexpat.so.1", "libffi.so.8", "liblzma.so.5",
    "libsqlite3.so.0", "libssl.so.3", "libuuid.so.1", "libz.so.1",
}  # fmt: skip
_SYSTEM = Path("/usr/lib/x86_64-linux-gnu")
_NOBODY = 65534

# $1: the root; $2: how to enter it; after them folders and files to show there, "--" and the command. The mounts are
# this process's own and go with it.
_ENTER = """
root=$1 enter=$2; shift 2
for place in /proc /sys /dev; do mount --rbind $place "$root$place"; done
while [ "$1" != -- ]; do mount --bind "$1" "$root$1"; shift; done
shift
exec chroot $enter "$root" "$@"
"""


def _python_files() -> list[Path]:
    shared = Path(sysconfig.get_config_var("LIBDIR") or "/") / (
        sysconfig.get_config_var("INSTSONAME") or "none"
    )
    return [
        Path(sys.executable).resolve(),
        Path(sysconfig.get_path("stdlib")),
        *([shared] if shared.suffix != ".a" and shared.is_file() else []),
    ]


def make_bare_root(root: Path) -> None:
    """Folders that everyone may pass, copies of the libraries, and a /tmp that everyone may write."""
    libraries = root / _SYSTEM.relative_to("/")
    libraries.mkdir(parents=True)
    for name in OF_EVERY_LINUX | OF_PYTHON:
        if (_SYSTEM / name).exists():
            (libraries / name).write_bytes((_SYSTEM / name).read_bytes())
            (libraries / name).chmod(0o755)
    (root / "lib").symlink_to("usr/lib")
    (root / "lib64").symlink_to("usr/lib/x86_64-linux-gnu")
    for name in ("proc", "sys", "dev", "tmp"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)


def run_in_bare_root(root: Path, shown: list[Path], command: list) -> subprocess.CompletedProcess:
    """Runs `command` there as a normal user, with the folders `shown` at their own places."""
    places = [*shown, *_python_files()]
    for place in places:
        inside = root / place.relative_to("/")
        (inside if place.is_dir() else inside.parent).mkdir(parents=True, exist_ok=True)
        if not place.is_dir():
            inside.touch()
    is_root = os.geteuid() == 0
    return subprocess.run(
        ["unshare", *([] if is_root else ["--user", "--map-root-user"]), "--mount", "bash", "-euc", _ENTER, "bare-root",
         root, f"--userspec={_NOBODY}:{_NOBODY}" if is_root else "", *places, "--", *command],
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "OMP_WAIT_POLICY": "passive"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
