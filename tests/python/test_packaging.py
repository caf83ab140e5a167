"""The wheel that is shipped: what it needs of a machine, and that it works where nothing else is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import pytest

import orlop
from bare_root import OF_EVERY_LINUX, OF_PYTHON, make_bare_root, run_in_bare_root

pytestmark = pytest.mark.packaging
pytest.importorskip("scikit_build_core")
elffile = pytest.importorskip("elftools.elf.elffile", reason="comes with auditwheel")

ROOT = Path(__file__).resolve().parents[2]
# What ccache knows objects by: where all of it is that of build/, its objects serve the wheel.
OF_THE_BUILD = (
    "CMAKE_CXX_COMPILER",
    "CMAKE_CXX_FLAGS_RELWITHDEBINFO",
    "ORLOP_PRECOMPILE",
)
# Libraries loaded on demand, and what each may ask the machine for.
LEFT_TO_THE_MACHINE = {
    "liborlop_cuda.so": r"lib(cuda|cublasLt|cudnn|nvrtc)\.so\.\d+",
    "liborlop_mpi.so": r"libmpi\.so\.\d+",
}
OLDEST_GLIBC = (2, 35)
VERSION, OTHER_VERSION = orlop.__version__.encode(), b"0.0.9"


def settings_of_the_build() -> dict[str, str]:
    cache = ROOT / "build" / "CMakeCache.txt"
    lines = cache.read_text(encoding="utf-8").splitlines() if cache.exists() else []
    known = {line.partition(":")[0]: line.partition("=")[2] for line in lines}
    return {name: known[name] for name in OF_THE_BUILD if name in known}


def run(*command, **options) -> subprocess.CompletedProcess:
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """As `make wheel` makes it, from the objects of the compiler cache where there is one."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "torch.py").write_text("raise AssertionError('the build imports torch: case I-06')")
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(folder)}
    settings = settings_of_the_build()
    if compiler := settings.pop("CMAKE_CXX_COMPILER", None):
        environment["CXX"] = compiler
    if shutil.which("ccache"):  # without the folder in the hash, objects of the other build trees fit
        for language in ("CXX", "CUDA"):
            environment[f"CMAKE_{language}_COMPILER_LAUNCHER"] = "ccache"
        environment["CCACHE_NOHASHDIR"] = "1"
    options = [f"-Ccmake.define.{name}={value}" for name, value in settings.items()]
    run(ROOT / ".ci" / "wheel.sh", folder, f"-Cbuild-dir={ROOT / 'build-wheel'}", *options, env=environment)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def fresh(wheel):
    """A fresh environment with the wheel, where a normal user may look; its dependencies are this one's."""
    with tempfile.TemporaryDirectory(prefix="orlop-wheel-") as folder:
        os.chmod(folder, 0o755)
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        python = Path(folder) / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
        (site,) = Path(folder).glob("lib/python3.*/site-packages")
        (site / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n", encoding="utf-8")
        yield site


def python_of(site: Path) -> Path:
    return site.parents[2] / "bin" / "python"


def libraries(site: Path) -> list[Path]:
    return sorted([*site.glob("orlop/*.so*"), *site.glob("orlop.libs/*.so*")])


def needed(library: Path) -> list[str]:
    with library.open("rb") as file:
        dynamic = elffile.ELFFile(file).get_section_by_name(".dynamic")
        return [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]


def glibc_versions(library: Path) -> list[tuple[int, ...]]:
    with library.open("rb") as file:
        section = elffile.ELFFile(file).get_section_by_name(".gnu.version_r")
        names = [aux.name for _, auxiliaries in section.iter_versions() for aux in auxiliaries]
    return [tuple(map(int, name[6:].split("."))) for name in names if re.fullmatch(r"GLIBC_[\d.]+", name)]


def test_libraries_need_only_what_every_linux_or_the_wheel_has(fresh):
    carried = {library.name for library in libraries(fresh)}
    assert {"liborlop.so.0", "libgomp.so.1"} < carried
    for library in libraries(fresh):
        left = LEFT_TO_THE_MACHINE.get(library.name, "none")
        for name in needed(library):
            assert name in OF_EVERY_LINUX | carried or re.fullmatch(left, name), (
                f"{library.name} needs {name}"
            )
        assert max(glibc_versions(library)) <= OLDEST_GLIBC, library.name
    assert not [name for name in carried if re.match("lib(cu|nv|nccl|mpi)", name)]


def test_notices_of_what_is_carried_are_there(fresh):
    noticed = {notice.name for notice in fresh.glob("orlop-*.dist-info/licenses/*")}
    libraries_of = {re.split("[-.]", library.name)[0].lower() for library in libraries(fresh)}
    for carried in libraries_of - {
        "_orlop",
        "liborlop",
        "liborlop_cuda",
        "liborlop_cuda_optimizer",
        "liborlop_mpi",
    }:
        assert any(carried in name for name in noticed), f"{carried}: {noticed}"


def test_the_tag_tells_the_oldest_linux(wheel):
    (oldest,) = re.findall(r"-manylinux_2_(\d+)_x86_64\.whl$", wheel.name)
    assert (2, int(oldest)) <= OLDEST_GLIBC


def test_flags_do_not_depend_on_the_machine_that_builds(wheel):
    """Case I-02: files that are named after an instruction set are compiled for it, all others for every processor."""
    rules = (ROOT / "build-wheel" / "build.ninja").read_text(encoding="utf-8")
    flags = dict(
        re.findall(r"^build (\S+\.o): (?:.*\n)(?:  (?!FLAGS).*\n)*  FLAGS = (.*)$", rules, re.MULTILINE)
    )
    assert len(flags) > 100
    machine = {name: [flag for flag in text.split() if flag.startswith("-m")] for name, text in flags.items()}
    assert not [
        name for name, options in machine.items() if re.search("-m(arch|tune|cpu)", " ".join(options))
    ]
    special = {Path(name).name for name, options in machine.items() if options}
    assert special == {f"{part}_{isa}.cc.o" for part in ("adam", "kernels") for isa in ("avx2", "avx512")}


def test_other_systems_are_refused_before_anything_is_compiled(tmp_path):
    """Case I-07."""
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_SYSTEM_NAME=Windows"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "not supported on Windows" in " ".join(result.stderr.split())


def test_source_build_states_its_needs(tmp_path):
    """Case I-06: everything that is missing, and the line that brings it."""
    without = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("nlohmann_json", "PkgConfig")]
    result = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path, "-DORLOP_CUDA=OFF", "-DORLOP_MPI=OFF", *without],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = " ".join(result.stderr.split())
    assert result.returncode != 0
    assert "this machine lacks nlohmann-json, pkg-config, hwloc." in told
    assert "apt-get install nlohmann-json3-dev pkg-config libhwloc-dev" in told


def test_module_and_command(fresh, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = run(python_of(fresh).with_name("orlop"), "--version", env=environment, cwd=tmp_path)
    assert result.stdout.startswith("orlop 0.") and not result.stderr
    result = run(python_of(fresh), "-c", "import orlop; print(orlop.__file__)", env=environment, cwd=tmp_path)
    assert result.stdout.strip() == str(fresh / "orlop" / "__init__.py")
    assert not (fresh / "include").exists()


ENGINE = """
import json, os, numpy, orlop
from orlop import hardware

folder = os.environ["HOME"]
with open(folder + "/config.json", "w") as file:
    json.dump({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
               "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 256,
               "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 4, "tie_word_embeddings": False}, file)
config = orlop.EngineConfig(
    device="auto", from_scratch=True, nvme=orlop.NvmeConfig(paths=[folder + "/drive"]),
    batch=orlop.BatchConfig(micro_batch_size=1, sequence_length=32, accumulation_steps=1),
    placement=orlop.PlacementConfig(nvme_optimizer_blocks=2),
)
ids = numpy.arange(33, dtype=numpy.int32)
with orlop.Engine.open(folder, config) as engine:
    losses = [engine.step([orlop.MicroBatch(ids[:-1], ids[1:])]).loss for _ in range(3)]
assert losses[2] < losses[0], losses
print(*losses)
file = orlop.AsyncFile(block_size=65536, queue_depth=4, engine="auto")
written, read = numpy.arange(100_000), numpy.zeros(100_000, int)
file.write(written, folder + "/file")
file.read(read, folder + "/file")
assert (written == read).all()
assert file.backend == ("io_uring" if hardware.io_uring() == "allowed" else "threads"), file.backend_reason
"""

ADAMW = """
import torch, orlop

model = torch.nn.Linear(64, 64)
before = model.weight.detach().clone()
optimizer = orlop.AdamW(model.parameters(), nvme=["/tmp/drive"])
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
optimizer.synchronize()
assert not torch.equal(before, model.weight)
"""

# Who it runs as, and that each library it has loaded is the wheel's, Python's, or one of the few of every Linux.
AROUND = """
import os, sys
assert not os.path.exists("/usr/bin")
%s
assert os.geteuid() == int(sys.argv[1]), os.geteuid()
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
foreign = [path for path in loaded if path.startswith("/usr/lib/x") and os.path.basename(path) not in sys.argv[2:]]
assert not foreign, foreign
openmp = [path for path in loaded if os.path.basename(path) == "libgomp.so.1"]
assert len(openmp) == 1 and "/usr/lib" not in openmp[0], openmp
"""


@pytest.fixture
def bare_root():
    with tempfile.TemporaryDirectory(prefix="orlop-root-") as folder:
        os.chmod(folder, 0o755)
        make_bare_root(Path(folder))
        yield Path(folder)


@pytest.mark.parametrize("program", [ENGINE, ADAMW], ids=["engine", "adamw"])
def test_normal_user_trains_with_a_drive_where_nothing_is_installed(fresh, bare_root, program):
    """Cases I-03 and I-04: no liburing, hwloc, fmt, spdlog, oneDNN or OpenMP, and no compiler, since nothing is compiled
    at run time: not even their folders."""
    if program is ADAMW:
        pytest.importorskip("torch")
    user = 65534 if os.geteuid() == 0 else 0
    result = run_in_bare_root(
        bare_root,
        [fresh.parents[2], Path(numpy.__file__).parents[1]],
        [python_of(fresh), "-c", AROUND % program, str(user), *OF_EVERY_LINUX, *OF_PYTHON],
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr


CHECK_DEVICE = """
import orlop
try:
    orlop._orlop.check_device(0)
except orlop.DeviceError as error:
    print(error)
"""


def cuda_of_the_wheel(site: Path) -> str | None:
    """The cuBLASLt that the CUDA part asks for; None for a wheel without one."""
    part = site / "orlop" / "liborlop_cuda.so"
    return next((name for name in needed(part) if "cublasLt" in name), None) if part.exists() else None


def test_cuda_needs_a_driver_and_for_an_engine_pytorchs_packages(fresh, bare_root):
    """Case I-05: without a toolkit, and for the optimizer of PyTorch's tensors beside a PyTorch for any CUDA. What is
    missing is told with the version that it is to have."""
    library, dependencies = cuda_of_the_wheel(fresh), Path(numpy.__file__).parents[1]

    def complaint(program: str) -> str:
        command = [python_of(fresh), "-c", program]
        result = run_in_bare_root(bare_root, [fresh.parents[2], dependencies], command)
        return result.stdout + result.stderr

    engine = ENGINE.replace('device="auto"', 'device="cuda"')
    if library is None:
        assert "liborlop_cuda_optimizer.so: cannot open" in complaint(CHECK_DEVICE)
        assert "liborlop_cuda.so: cannot open" in complaint(engine)
        return
    major = library.rpartition(".")[2]
    no_driver = rf"no NVIDIA driver .* driver for CUDA {major}\.\d+"
    assert re.search(no_driver, complaint(CHECK_DEVICE))
    assert re.search(rf"{library}: cannot open .* for CUDA {major}\.\d+: install PyTorch", complaint(engine))
    if (dependencies / "nvidia" / f"cu{major}" / "lib" / library).exists():
        (fresh / "nvidia").symlink_to(dependencies / "nvidia")
        assert re.search(no_driver, complaint(engine))


@pytest.mark.parametrize("patched", ["liborlop.so.0", "liborlop_cuda_optimizer.so"])
def test_libraries_of_two_versions_are_told_with_both(fresh, tmp_path, patched):
    """Case I-05: an installation of which a part was left or put there by another."""
    if patched == "liborlop_cuda_optimizer.so" and cuda_of_the_wheel(fresh) is None:
        pytest.skip("a wheel without CUDA")
    shutil.copytree(fresh / "orlop", tmp_path / "orlop")
    for beside in ("orlop.libs", "nvidia"):
        if (fresh / beside).exists():
            (tmp_path / beside).symlink_to(fresh / beside)
    library = tmp_path / "orlop" / patched
    library.write_bytes(library.read_bytes().replace(VERSION + b"\0", OTHER_VERSION + b"\0"))
    result = subprocess.run(
        [python_of(fresh), "-c", CHECK_DEVICE], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    told = result.stdout + result.stderr
    assert VERSION.decode() in told and OTHER_VERSION.decode() in told, told
    assert ("ImportError" in told) == (patched == "liborlop.so.0")


@pytest.mark.parametrize("processor", ["Haswell", "Nehalem"], ids=["avx2", "no_avx"])
def test_wheel_runs_on_older_processors(fresh, tmp_path, processor):
    """Case I-01: it has every path, this machine's may be AVX-512; a wrong one ends by SIGILL."""
    if not shutil.which("qemu-x86_64"):
        pytest.skip("no qemu-x86_64 (Debian: qemu-user)")
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    losses = []
    for name, emulator in {"here": [], "there": ["qemu-x86_64", "-cpu", processor]}.items():
        (tmp_path / name).mkdir()
        command = [*emulator, python_of(fresh), "-c", ENGINE]
        result = run(*command, env=environment | {"HOME": str(tmp_path / name)}, timeout=120)
        losses.append([float(loss) for loss in result.stdout.split()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_wheel_is_imported_on_any_processor_of_64_bits(fresh):
    """Case I-01: the first of them; NumPy itself asks for more."""
    if not shutil.which("qemu-x86_64"):
        pytest.skip("no qemu-x86_64 (Debian: qemu-user)")
    program = "import orlop; print(orlop.plan.__name__)"
    assert run("qemu-x86_64", "-cpu", "qemu64", python_of(fresh), "-c", program).stdout == "plan\n"
