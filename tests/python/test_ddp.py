"""orlop.AdamW with gradients="stay" under torch's DistributedDataParallel: two processes over gloo, on the CPU.

The two go through all scenarios of ddp_worker.py once; each test looks at what one of them has left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("PyTorch without gloo", allow_module_level=True)

RANKS = (0, 1)
DEADLINE_SECONDS = 180


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(what each rank saw, folder, how each ended, what each said, when)"""
    folder = tmp_path_factory.mktemp("ddp")
    # The ranks are of this machine, whatever its name resolves to.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
    worker = Path(__file__).with_name("ddp_worker.py")
    logs = [folder / f"log-{rank}" for rank in RANKS]
    ranks = []
    try:
        for rank in RANKS:
            with open(logs[rank], "w") as log:
                command = [sys.executable, str(worker), str(rank), str(folder)]
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(DEADLINE_SECONDS) for process in reversed(ranks)][::-1]
    finally:
        for process in ranks:
            process.kill()
    said = [log.read_text() for log in logs]
    files = [folder / f"rank-{rank}.pt" for rank in RANKS]
    assert all(file.is_file() for file in files), "\n".join(said)
    return [torch.load(file) for file in files], folder, codes, said, time.time()


@pytest.fixture(scope="module")
def seen(run):
    return run[0]


def same(a, b) -> bool:
    """Bit for bit, NaN too."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, torch.Tensor):
        return a == b
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def assert_equals_torch(of_ranks):
    first, second = of_ranks
    assert same(first["ours"], second["ours"]), "the ranks hold the same bits"
    for name, expected in first["theirs"].items():
        torch.testing.assert_close(
            first["ours"][name], expected, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("way", ["plain", "hidden", "summed", "views", "trainer"])
def test_training_is_that_of_torch(seen, way):
    """Cases D-08, D-12: with a tied weight, its gradient in two pieces; with module=, with micro-batches that are
    summed before they are averaged, with gradients that are views of DDP's buckets, and in the Trainer. The norm
    takes no collective and is the same on both ranks, each of which has the whole average."""
    first, second = (rank[way] for rank in seen)
    assert_equals_torch((first, second))
    assert first["norms"]["ours"] == second["norms"]["ours"]
    assert first["norms"]["ours"] == pytest.approx(first["norms"]["theirs"], rel=1e-5)
    assert max(first["norms"]["ours"]) > 0.5, "it was clipped"


@pytest.mark.parametrize("way", ["skip", "skip, hidden", "skip, summed"])
def test_a_gradient_of_one_rank_that_is_not_finite_skips_the_step_on_both(seen, way):
    for rank in seen:
        found = rank[way]
        assert (found["skipped"], found["steps"]) == (1, 3)
        assert "is not finite" in found["bad"]
        before, at, after = found["weights"][1:]
        assert same(before, at)
        assert not same(at, after)
    assert same(seen[0][way]["weights"], seen[1][way]["weights"])


def test_a_gradient_of_one_rank_that_is_not_finite_is_an_error_of_both(seen):
    for rank in seen:
        ((step, text),) = rank["raise"]["raised"]
        assert step == 2
        assert "is not finite" in text
        assert same(*rank["raise"]["weights"][1:3])


@pytest.mark.parametrize("way", ["checkpoint", "checkpoint, hidden"])
def test_what_one_rank_saves_every_rank_loads(seen, way):
    for rank in seen:
        found = rank[way]
        assert same(found["straight"], found["resumed"])
        assert same(*found["moments"])
    assert same(seen[0][way], seen[1][way])


def test_experts_that_work_on_one_rank_only(seen):
    """Case D-01: nobody waits for a gradient that one rank does not have; an expert of no rank stays as it is."""
    first, second = (rank["experts"] for rank in seen)
    assert_equals_torch((first, second))
    for name, start in first["start"].items():
        assert same(first["ours"][name], start) == name.startswith("experts.7."), name


def test_generation_of_unequal_length_and_readers_on_one_rank(seen):
    """Cases D-02, D-13: every rank has whole weights, and no function of the optimizer is a hidden collective."""
    assert [rank["generation"]["tokens"] for rank in seen] == [8, 40]
    for rank in seen:
        assert same(rank["generation"]["generating"], rank["generation"]["plain"])
    assert same(seen[0]["generation"]["plain"], seen[1]["generation"]["plain"])


def test_mixed_formats_frozen_and_empty_weights(seen):
    """Cases D-04, D-05, D-11: each comes back in its own format, with the bits that one process has of the same
    gradients."""
    first, second = (rank["mixed"] for rank in seen)
    assert same(first["together"], second["together"])
    assert same(first["together"], first["alone"])
    frozen = [name for name, value in first["start"].items() if same(value, first["together"][name])]
    assert frozen == ["table", *(f"layers.{i}.bias" for i in (1, 3, 5)), "none.weight", "none.bias"]


@pytest.mark.parametrize("way", ["leave", "module", "wrap", "made before the ranks met"])
def test_gradients_that_leave_are_refused(seen, way):
    for rank in seen:
        assert 'gradients="leave" takes gradients before 2 ranks have averaged them' in rank["refusals"][way]
        assert 'use gradients="stay"' in rank["refusals"][way]


def test_a_killed_rank_ends_the_other(run):
    """Case D-10: the error is that of torch's collective; no thread of the optimizer keeps the process."""
    _, folder, codes, said, end = run
    assert codes == [1, -9]
    assert (folder / "told").read_text().startswith("5 "), said[0]
    assert end - float((folder / "killed-1").read_text()) < 30
