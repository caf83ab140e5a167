"""The safetensors package and Orlop read each other's files.

Usage: safetensors_interop.py PROGRAM. Exit code 77 when the package is not installed.
"""

import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

PROGRAM = sys.argv[1]
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def orlop_reads(path):
    out = subprocess.run([PROGRAM, "read", path], check=True, capture_output=True, text=True)
    return sorted(out.stdout.splitlines())


def expected_lines(tensors):
    lines = []
    for name, array in tensors.items():
        data = np.frombuffer(array.tobytes(), np.uint8).astype(np.uint64)
        total = int((data * np.arange(1, data.size + 1, dtype=np.uint64)).sum())
        lines.append(f"{name} {NAMES[array.dtype.name]} {list(array.shape)} {total}")
    return sorted(lines)


def package_reads_orlop(folder):
    path = folder / "orlop.safetensors"
    subprocess.run([PROGRAM, "write", path], check=True)
    tensors = load_file(path)
    assert tensors["none"].shape == (0, 3) and tensors["none"].dtype == np.float16
    assert tensors["scalar"].shape == () and tensors["scalar"] == 0
    np.testing.assert_array_equal(tensors["f32"], np.arange(21, dtype=np.float32).reshape(3, 7))
    np.testing.assert_array_equal(tensors["i8"], np.arange(5, dtype=np.int8))
    np.testing.assert_array_equal(tensors['i64 "quoted" é'], np.arange(4).reshape(2, 1, 2))
    assert len(tensors) == 5
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt", 'a "key"': "a\nvalue"}


def orlop_reads_package(folder):
    random = np.random.default_rng(20240607)
    for case in range(20):
        tensors = {}
        for index in range(random.integers(1, 8)):
            shape = tuple(random.integers(0, 7, random.integers(0, 4)))
            dtype = random.choice(list(NAMES))
            tensors[f"layer.{index}.é"] = random.integers(0, 2, shape).astype(dtype)
        path = folder / f"package-{case}.safetensors"
        save_file(tensors, path, {"format": "np"})
        assert orlop_reads(path) == expected_lines(tensors), path


with tempfile.TemporaryDirectory() as name:
    package_reads_orlop(pathlib.Path(name))
    orlop_reads_package(pathlib.Path(name))
print("ok")
