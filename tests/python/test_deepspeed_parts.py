"""DeepSpeed's initialize, states by parameter, zero and aio."""

from __future__ import annotations

import argparse

import pytest

torch = pytest.importorskip("torch")

from deepspeed_net import Net, assert_close, data, make, plain, train, usual_log_level, weights  # noqa: E402, F401

import orlop  # noqa: E402
from orlop import deepspeed_compat as deepspeed  # noqa: E402

# --- initialize -----------------------------------------------------------------------------------


def test_initialize_with_data_and_arguments(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "gradient_accumulation_steps": 2, optimizer: {type: "AdamW"}}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    dataset = [data(i) for i in range(10)]
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args,
        model=Net(),
        training_data=dataset,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3),
    )
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler
    assert [len(x) for x, _ in loader] == [4, 4, 2]
    assert engine.get_lr() == [5e-4]


def rows(loader):
    return [value for batch in loader for value in batch.flatten().tolist()]


def test_training_data_is_shuffled():
    """In a new order each pass, which torch's seed decides."""
    config = {"train_micro_batch_size_per_gpu": 4}
    dataset = torch.arange(50)

    def passes():
        torch.manual_seed(3)
        _, _, loader, _ = deepspeed.initialize(
            model=torch.nn.Linear(1, 1),
            config=config,
            training_data=dataset,
            collate_fn=lambda x: -torch.stack(x),
        )
        torch.manual_seed(3)
        return [rows(loader) for _ in range(2)]

    first, second = passes()
    assert sorted(first) == sorted(second) == sorted((-dataset).tolist())
    assert first != second and (-dataset).tolist() not in (first, second)
    assert passes() == [first, second]


def test_arguments_of_deepspeed_io():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(10))

    engine = make(dataloader_drop_last=True)
    dataset, in_order = torch.arange(50), list(range(50))
    assert rows(engine.deepspeed_io(Endless())) == list(range(8))
    assert rows(engine.deepspeed_io(dataset, 5, "eval")) == in_order
    assert rows(engine.deepspeed_io(dataset, 5, route="predict", num_local_io_workers=1)) == in_order
    sampler = torch.utils.data.SequentialSampler(dataset)
    assert (
        rows(engine.deepspeed_io(dataset, batch_size=25, data_sampler=sampler, pin_memory=False)) == in_order
    )
    pairs = engine.deepspeed_io(dataset, 2, data_sampler=sampler, collate_fn=lambda x: torch.stack(x) + 1)
    assert [len(batch) for batch in pairs] == [2] * 25 and rows(pairs) == [i + 1 for i in in_order]
    assert sorted(rows(engine.deepspeed_io(dataset, 5))) == in_order != rows(engine.deepspeed_io(dataset, 5))
    with pytest.raises(orlop.UsageError, match="route 'test'"):
        engine.deepspeed_io(dataset, route="test")
    bare, *_ = deepspeed.initialize(model=Net(), config={})
    with pytest.raises(orlop.UsageError, match="train_micro_batch_size_per_gpu"):
        bare.deepspeed_io(dataset)


def test_mistakes_are_named(monkeypatch):
    with pytest.raises(orlop.UsageError, match="model is missing"):
        deepspeed.initialize(config={})
    with pytest.raises(orlop.UsageError, match="config is missing"):
        deepspeed.initialize(model=Net())
    with pytest.raises(orlop.UsageError, match="mpu"):
        deepspeed.initialize(model=Net(), config={}, mpu=object())
    engine, *_ = deepspeed.initialize(model=Net(), config={})
    with pytest.raises(orlop.UsageError, match="no optimizer"):
        engine.step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(orlop.UsageError, match="started 2"):
        deepspeed.initialize(model=Net(), config={})


# --- utils, zero, aio -----------------------------------------------------------------------------


def test_states_by_parameter():
    """Case B-08: gradients, masters and moments through safe_get and safe_set."""
    engine = make(bf16={"enabled": True}, zero_optimization={"stage": 3})
    p = engine.module.inp.weight
    u = deepspeed.utils
    x, y = data(0, torch.bfloat16)
    engine.backward(((engine(x).float() - y) ** 2).mean())
    gradient = u.safe_get_full_grad(p)
    assert gradient.dtype == torch.float32 and gradient.abs().sum() > 0
    assert u.safe_get_full_optimizer_state(p, "exp_avg") is None
    u.safe_set_full_grad(p, 2 * gradient)
    u.safe_update_full_grad_vectorized([engine.module.out.weight], lambda g, _: torch.zeros_like(g))
    engine.step()
    torch.testing.assert_close(u.safe_get_full_optimizer_state(p, "exp_avg"), 0.2 * gradient)
    assert not u.safe_get_full_optimizer_state(engine.module.out.weight, "exp_avg").any()
    master = u.safe_get_full_fp32_param(p)
    assert torch.equal(master.to(torch.bfloat16), p)
    u.safe_set_full_fp32_param(p, master * 3)
    assert torch.equal(u.safe_get_full_fp32_param(p), master * 3)
    u.safe_set_full_optimizer_state(p, torch.ones_like(master), "exp_avg_sq")
    assert (u.safe_get_local_optimizer_state(p, "exp_avg_sq") == 1).all()
    assert u.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(1))) is None
    assert u.set_z3_leaf_modules(engine.module, [torch.nn.Linear])


def test_zero_init_and_gathered_parameters():
    """Cases M-12, B-09: weights are born in 16 bit; what is written while gathered is where the step starts."""
    before = torch.get_default_dtype()
    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        model = Net()
    assert torch.get_default_dtype() == before
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    engine = make(model, bf16={"enabled": True}, zero_optimization={"stage": 3})
    train(engine, 2)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        model.inp.weight.zero_()
        model.inp.weight[0, 0] = 1.0
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    train(engine, 1)
    assert model.inp.weight.sum() == 1.0
    with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped:
        assert unwrapped is model


def test_aio_handle(tmp_path):
    handle = deepspeed.ops.aio.aio_handle(block_size=1 << 16, queue_depth=8)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (
        1 << 16,
        8,
        1,
    )
    assert handle.get_alignment() > 0
    tensor = torch.arange(300_001, dtype=torch.int32)
    path = str(tmp_path / "t.bin")
    assert handle.sync_pwrite(tensor, path) == 1
    back = torch.zeros_like(tensor)
    assert handle.async_pread(back, path) == 0
    assert handle.wait() == 1 and torch.equal(back, tensor)
    half = torch.zeros(1000, dtype=torch.int32)
    with open(path, "rb") as file:
        handle.async_pread(half, file.fileno(), 4000)
        handle.wait()
    assert torch.equal(half, tensor[1000:2000])
    locked = handle.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.float16))
    assert locked.dtype == torch.float16 and not locked.any()
    assert handle.write(locked, path, validate=True) == 1
    assert handle.free_cpu_locked_tensor(locked) and not handle.free_cpu_locked_tensor(tensor)
    with pytest.raises(orlop.IoError, match="missing"):
        handle.read(back, str(tmp_path / "missing"))
    with pytest.raises(orlop.UsageError, match="contiguous"):
        handle.read(torch.ones(4, 4).t()[1:], path)
