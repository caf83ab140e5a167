"""Memory of an orlop.AdamW, and processes: what ends, forks, imports and lacks leave behind."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

torch = pytest.importorskip("torch")

from adamw_pair import GRADIENTS, backward, run_python  # noqa: E402
from memory_use import allocated, arena_bytes, resident_bytes  # noqa: E402

import orlop  # noqa: E402


def test_frozen_weights_cost_nothing():
    """Case M-01: bytes follow trainable elements; a frozen group is accepted and keeps its bytes."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(24)).to(torch.bfloat16)
    layers[:23].requires_grad_(False)
    frozen = [p.detach().clone() for p in layers[:23].parameters()]
    decay = [p for p in layers.parameters() if p.ndim == 2]
    rest = [p for p in layers[:23].parameters() if p.ndim == 1]
    optimizer = orlop.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], gradients="leave")
    report = optimizer.memory_report()
    assert (report["masters"], report["moments"], report["gradients"]) == (2 * 4096, 8 * 4096, 2 * 4096)
    for _ in range(20):
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(frozen, layers[:23].parameters(), strict=True))
    assert optimizer.memory_report() == report


@pytest.mark.parametrize("end", ["close", "collected", "refused"])
def test_twenty_optimizers_leave_nothing_behind(end):
    """Case R-10: memory and threads after round 20 are those after round 2, as arenas and allocators count them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    bad = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    after = []
    for _ in range(20):
        before = arena_bytes()
        optimizer = orlop.AdamW(model.parameters(), module=model)
        assert arena_bytes() > before, "what is counted below"
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if end == "refused":
            with pytest.raises(TypeError):
                optimizer.add_param_group({"params": [bad]})
        if end == "close":
            optimizer.close()
        del optimizer
        after.append((arena_bytes(), len(os.listdir("/proc/self/task")), *allocated()))
    (arenas, threads, heap, blocks, tensors), last = after[1], after[-1]
    assert last[0] <= arenas, after
    assert last[1] <= threads
    assert last[2] <= heap + (64 << 10), after
    assert last[3] <= blocks + 400 and last[4] == tensors, after
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("cycle", [False, True])
def test_gradients_that_are_away_go_with_their_optimizer(cycle):
    """The model can be trained and converted without it; those of another optimizer stay."""
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    optimizers = [orlop.AdamW(model.parameters(), gradients="leave") for model in models]
    later = orlop.AdamW([models[0].bias], gradients="leave")
    for model in models:
        model(torch.ones(2, 4)).sum().backward()
    later.zero_grad()
    models[0].bias.sum().backward()
    while optimizers:
        optimizer = optimizers.pop()
        if cycle:
            optimizer.itself = optimizer
    del optimizer
    gc.collect()
    assert models[0].weight.grad is models[1].weight.grad is models[1].bias.grad is None
    assert torch.equal(later.gradient(models[0].bias), torch.ones(3))
    for model in models:
        model.zero_grad(set_to_none=False)
        model.half().float()
        model(torch.ones(2, 4)).sum().backward()
    reference = weakref.ref(models.pop().weight)
    del model
    gc.collect()
    assert reference() is None


@GRADIENTS
def test_a_thousand_steps_do_not_grow(gradients):
    p = torch.nn.Parameter(torch.ones(4096))
    optimizer = orlop.AdamW([p], gradients=gradients)
    for step in range(1100):
        if step == 100:
            before = resident_bytes()
        backward(p, step)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert resident_bytes() <= before + 2**20


def test_two_optimizers_in_turn():
    """Case B-07: each equals its run alone, also when the other ends in the middle."""

    def run(p, optimizer, step):
        backward(p, step)
        optimizer.step()
        optimizer.zero_grad()

    alone, together = [], []
    for seed in (1, 2):
        p = torch.nn.Parameter(torch.full((100,), float(seed)))
        optimizer = orlop.AdamW([p], lr=0.1 * seed)
        for step in range(10):
            run(p, optimizer, step)
        alone.append(p.detach())
    params = [torch.nn.Parameter(torch.full((100,), float(seed))) for seed in (1, 2)]
    optimizers = [orlop.AdamW([p], lr=0.1 * (i + 1)) for i, p in enumerate(params)]
    for step in range(10):
        for p, optimizer in zip(params, optimizers, strict=True):
            if not (step >= 5 and p is params[1]):
                run(p, optimizer, step)
        if step == 5:
            kept = params[1].detach().clone()
            optimizers[1].close()
    together = params[0].detach()
    assert torch.equal(together, alone[0])
    assert torch.equal(kept, params[1])


def test_forked_workers_leave_the_optimizer_alone():
    """Case B-05: children of a data loader end normally or by exception, without a word."""
    result = run_python(
        """
        import os, sys, torch, orlop
        p = torch.nn.Parameter(torch.ones(1000))
        optimizer = orlop.AdamW([p], gradients="leave")
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 16
            def __getitem__(self, i):
                if i == 13: raise ValueError("planted")
                return torch.tensor(float(i))
        pid = os.fork()
        if pid == 0:
            try: optimizer.synchronize()
            except orlop.UsageError as error: print("refused:", "fork" in str(error), flush=True)
            del optimizer
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        try:
            for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):
                (p * batch.sum()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except ValueError:
            print("planted error arrived")
        p.sum().backward()
        optimizer.step()
        print("steps", optimizer.steps)
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split("\n")[:2] == ["refused: True", "planted error arrived"]
    assert "steps" in result.stdout


def test_exit_while_an_update_runs():
    """Case B-04: the interpreter ends at once, with and without a reference left, many times."""
    # Interpreters that are forked from one that has imported what the first optimizer imports: that is most of the time
    # of such a process.
    code = """
        import os, sys, torch, torch._dynamo, orlop
        for end in ("pass", "del optimizer", "del model", "optimizer.close()") * 2:
            pid = os.fork()
            if pid == 0:
                break
            assert os.waitpid(pid, 0)[1] == 0, end
        else:
            sys.exit(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(8)))
        optimizer = orlop.AdamW(model.parameters(), module=model, threads=1)
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        exec(end)
        print("end of", end, flush=True)
        """
    result = run_python(code, timeout=600)
    assert (result.returncode, result.stderr) == (0, "")
    ends = ("pass", "del optimizer", "del model", "optimizer.close()") * 2
    assert result.stdout.splitlines() == [f"end of {end}" for end in ends]


def test_importing_orlop_imports_no_torch():
    result = run_python("import sys, orlop; print('torch' in sys.modules, 'AdamW' in dir(orlop))")
    assert (result.stdout, result.stderr) == ("False True\n", "")


@pytest.mark.parametrize(
    ("fake", "text"),
    [
        ("raise ImportError(\"No module named 'torch'\")", "not installed"),
        ("__version__ = '2.3.1+cu121'", "2.3.1+cu121 is installed"),
    ],
    ids=["missing", "old"],
)
def test_one_clear_message_without_torch(tmp_path, fake, text):
    """Without torch, and with one that is too old."""
    (tmp_path / "torch.py").write_text(fake)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = run_python(
        """
        import orlop
        try: orlop.AdamW
        except orlop.UsageError as error: print(error)
        try: from orlop import AdamW
        except ImportError as error: print("ImportError")
        """,
        PYTHONPATH=path,
    )
    message, *rest = result.stdout.splitlines()
    assert "PyTorch 2.4 or newer" in message and text in message and "pip install" in message
    assert (rest, result.stderr) == (["ImportError"], "")
