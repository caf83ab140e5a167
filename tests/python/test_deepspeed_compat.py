"""DeepSpeed's call sequence: training equals plain PyTorch, and every A key changes something."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from deepspeed_net import Net, assert_close, data, make, plain, train, usual_log_level, weights  # noqa: E402, F401

import orlop  # noqa: E402
from orlop import deepspeed_compat as deepspeed  # noqa: E402

# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_equals_torch(stage):
    """Case N-19 on one rank; stage 3 hides the update under the next forward."""
    engine = make(zero_optimization={"stage": stage, "offload_optimizer": {"device": "cpu"}})
    assert (engine.optimizer._gate is not None) == (stage == 3)
    train(engine, 20)
    assert_close(weights(engine), plain(20))


@pytest.mark.parametrize("client", [None, "torch"])
def test_weights_in_host_memory(client, tmp_path):
    """offload_param: blocks come and go; training, gathering and checkpoints are those of whole weights."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}

    def build():
        model = Net()
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) if client else None
        return make(model, theirs, zero_optimization=zero)

    engine = build()
    train(engine, 10)
    engine.save_checkpoint(tmp_path)
    train(engine, 10, first=10)
    assert all(p.untyped_storage().nbytes() == 0 for p in engine.module.blocks.parameters())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        final = [p.detach().clone() for p in engine.module.parameters()]
    assert_close(final, plain(20))
    other = build()
    other.load_checkpoint(tmp_path)
    train(other, 10, first=10)
    state, expected = other.module.state_dict(), engine.module.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_accumulation_and_clipping():
    engine = make(gradient_accumulation_steps=4, gradient_clipping=0.1)
    boundaries = []
    for step in range(16):
        x, y = data(step)
        engine.backward(((engine(x) - y) ** 2).mean())
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
        assert engine.was_step_applied() == boundaries[-1]
    assert boundaries == [False, False, False, True] * 4
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 16, 64)
    assert engine.get_global_grad_norm() > 0.1
    assert_close(weights(engine), plain(16, 4, 0.1))
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (16, 4)
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 2


@pytest.mark.parametrize("kind", ["torch", "callable", "ours", "compat"])
def test_optimizer_of_the_client(kind):
    model = Net()
    arguments = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = {
        "torch": lambda: torch.optim.AdamW(model.parameters(), **arguments),
        "callable": lambda: lambda params: torch.optim.AdamW(params, **arguments),
        "ours": lambda: orlop.AdamW(model.parameters(), **arguments),
        "compat": lambda: deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **arguments),
    }[kind]()
    engine = make(model, optimizer)
    train(engine, 10)
    assert_close(weights(engine), plain(10))
    with pytest.raises(orlop.UsageError, match="SGD"):
        make(Net(), lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("mode", [True, False])
def test_deepspeed_cpu_adam(mode):
    """Case N-02: adamw_mode; and moments in bf16."""
    model = Net()
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        model.parameters(), lr=1e-2, weight_decay=0.1, adamw_mode=mode
    )
    for step in range(10):
        x, y = data(step)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = plain(10, optimizer_class=torch.optim.AdamW if mode else torch.optim.Adam)
    assert_close([p.detach() for p in model.parameters()], expected)
    for option in ({"amsgrad": True}, {"bias_correction": False}):
        with pytest.raises(orlop.UsageError, match=next(iter(option))):
            deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **option)
    half = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), fp32_optimizer_states=False)
    assert half.memory_report()["moments"] == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(precision):
    engine = make(**{precision: {"enabled": True}})
    assert (
        next(engine.module.parameters()).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    )
    losses = train(engine, 60)
    reference = make()
    expected = train(reference, 60)
    assert sum(losses[-10:]) == pytest.approx(sum(expected[-10:]), rel=0.03)


def test_gradients_in_fp16_keep_their_small_part():
    """The loss scale is taken out in fp32: gradients of 1e-7 still move the weights."""
    engine = make(fp16={"enabled": True, "initial_scale_power": 16})
    before = weights(engine)
    x, y = data(0, torch.float16)
    engine.backward(1e-6 * ((engine(x).float() - y) ** 2).mean())
    small = engine.optimizer.gradient(engine.module.out.bias).abs().max().item() / 2**16
    engine.step()
    assert 0 < small < 1e-5
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))


def test_loss_scale_follows_deepspeed():
    """Dynamic: halves at the second overflow (hysteresis 2), doubles after a window; static stays."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 2}
    engine = make(fp16=fp16)
    scales = []
    for step, factor in enumerate((1, 1, 1, math.inf, math.inf, 1, 1, 1)):
        train(engine, 1, first=step, factor=factor)
        scales.append(engine.loss_scaler.scale)
        assert engine.optimizer.overflow == (factor == math.inf)
    assert scales == [16, 16, 32, 32, 16, 16, 16, 32]
    assert (engine.skipped_steps, engine.global_steps) == (2, 8)
    static = make(fp16={"enabled": True, "loss_scale": 8})
    train(static, 2, factor=math.inf)
    assert static.loss_scaler.scale == 8


def test_endless_overflow_ends():
    """Case N-07."""
    engine = make(fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1})
    with pytest.raises(orlop.NonFiniteError, match="smallest loss scale"):
        train(engine, 40, factor=math.nan)


def test_bf16_overflow_is_checked_or_not():
    for checked in (True, False):
        engine = make(bf16={"enabled": True, "check_grad_overflow": checked})
        train(engine, 1, factor=math.inf)
        assert torch.isfinite(weights(engine)[0]).all() == checked
        assert engine.skipped_steps == int(checked)


# --- A keys ---------------------------------------------------------------------------------------


def run_config(**config):
    engine = make(**config)
    train(engine, 4)
    return engine


@pytest.mark.parametrize(
    ("config", "observe"),
    [
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
         lambda e: e.optimizer.state[e.module.inp.weight]["exp_avg"].dtype),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, lambda e: e(data(0)[0]).dtype),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, lambda e: e.optimizer._gradients),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, lambda e: e.optimizer._gate is not None),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "cpuadam_cores_perc": 0.01}}},
         lambda e: e.optimizer._threads),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.6], "eps": 1e-3}}},
         lambda e: (e.optimizer.param_groups[0]["betas"], e.optimizer.param_groups[0]["eps"])),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, lambda e: e.optimizer._decoupled),
        ({"gradient_clipping": 1e-3}, lambda e: e.gradient_clipping()),
        ({"train_micro_batch_size_per_gpu": 2}, lambda e: e.train_batch_size()),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)  # fmt: skip
def test_keys_change_something(config, observe):
    changed, usual = observe(run_config(**config)), observe(run_config())
    assert changed != usual, (changed, usual)


def test_accumulation_in_the_hands_of_the_caller():
    """managed_gradient_accumulation false: every step() updates, and losses are not divided."""
    managed = run_config(gradient_accumulation_steps=4)
    own = run_config(gradient_accumulation_steps=4, managed_gradient_accumulation=False)
    assert (managed.optimizer.steps, own.optimizer.steps) == (1, 4)
    assert_close(weights(own), plain(4))


@pytest.mark.parametrize("managed", [True, False])
def test_a_backward_of_the_caller(managed):
    """scale() is what the engine's own backward() starts from."""
    engines = [
        make(gradient_accumulation_steps=4, managed_gradient_accumulation=managed, fp16={"enabled": True})
        for _ in range(2)
    ]
    x, y = data(0, torch.float16)
    gradients = []
    for engine, own in zip(engines, (False, True), strict=True):
        loss = ((engine(x).float() - y) ** 2).mean()
        engine.scale(loss).backward() if own else engine.backward(loss)
        gradients.append(engine.optimizer.gradient(engine.module.out.bias))
    assert torch.equal(*gradients)


def test_unused_parameters():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.never = torch.nn.Linear(2, 2)

    train(make(Unused()), 1)
    with pytest.raises(orlop.UsageError, match=r"never\.weight"):
        train(make(Unused(), zero_optimization={"ignore_unused_parameters": False}), 1)


def test_what_is_ignored_is_said(caplog):
    """Unknown keys as warnings, with their path; keys of grade B as what they become."""
    with caplog.at_level("INFO", logger="orlop"):
        make(zero_optimization={"stage": 2, "reduce_scatter": True}, fp16={"enabeld": True}, stage=3)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", "config: zero_optimization.reduce_scatter = True: one rank: nothing is communicated"),
        ("WARNING", "config: fp16.enabeld = True: unknown, ignored; did you mean 'fp16.enabled'?"),
        ("WARNING", "config: stage = 3: unknown, ignored; did you mean 'zero_optimization.stage'?"),
    ]


def test_lines_and_monitors(tmp_path, capsys):
    engine = make(
        steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True, dump_state=True, log_level="error",
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    )  # fmt: skip
    train(engine, 4)
    lines = capsys.readouterr().out.splitlines()
    printed = [line for line in lines if line.startswith("step=")]
    assert [line.split(",")[0] for line in printed] == ["step=2", "step=4"]
    assert all("forward=" in line and "moments" in line for line in printed)
    assert any("gradient_clipping" in line for line in lines)
    rows = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert rows[0] == "step,train_loss" and [row.split(",")[0] for row in rows[1:]] == ["4", "8", "12", "16"]


SCHEDULES = {
    "WarmupLR": ({"warmup_max_lr": 0.1, "warmup_num_steps": 10}, {0: 0.0, 4: 0.1 * math.log(5) / math.log(10), 10: 0.1, 30: 0.1}),
    "WarmupDecayLR": ({"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 20},
                      {0: 0.0, 5: 0.05, 10: 0.1, 15: 0.05, 20: 0.0}),
    "WarmupCosineLR": ({"warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 20, "cos_min_ratio": 0.0},
                       {0: 0.0, 5: 0.005, 14: 0.005, 19: 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    """Rates by step, from DeepSpeed's formulas; a skipped step does not advance them."""
    params, expected = SCHEDULES[name]
    engine = make(scheduler={"type": name, "params": params})
    rates = []
    for step in range(31):
        rates.append(engine.get_lr()[0])
        train(engine, 1, first=step)
    for step, rate in expected.items():
        assert rates[step] == pytest.approx(rate, abs=1e-12), step
    before = engine.get_lr()
    train(engine, 1, factor=math.nan)
    assert engine.get_lr() == before


def last_rates(params, name="WarmupLR"):
    """The lr of each group when the warm-up is over; the groups begin with 1e-2 and 5e-3."""
    model = Net()
    blocks = [*model.blocks.parameters()]
    others = [p for p in model.parameters() if not any(p is q for q in blocks)]
    groups = [{"params": others, "lr": 1e-2}, {"params": blocks, "lr": 5e-3}]
    schedule = {"type": name, "params": {"warmup_num_steps": 2, "warmup_type": "linear", **params}}
    engine = make(model, torch.optim.AdamW(groups), scheduler=schedule)
    train(engine, 2)
    return engine.get_lr()


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupLR", {}, [1e-2, 5e-3]),
        ("WarmupLR", {"warmup_max_lr": "auto"}, [1e-2, 5e-3]),
        ("WarmupDecayLR", {"warmup_max_lr": "auto", "total_num_steps": 4}, [1e-2, 5e-3]),
        ("WarmupDecayLR", {"total_num_steps": 4}, [1e-3, 1e-3]),
        ("WarmupLR", {"warmup_max_lr": [0.1, "1e-2"]}, [0.1, 0.01]),
        ("WarmupLR", {"warmup_max_lr": "0.1"}, [0.1, 0.1]),
    ],
)
def test_highest_rate_of_a_warm_up(name, params, expected):
    """As given, one for all groups or one for each; else the lr of each group."""
    assert last_rates(params, name) == pytest.approx(expected)


def test_a_rate_per_group_needs_every_group():
    with pytest.raises(orlop.UsageError, match=r"warmup_min_lr has 3 rates, the optimizer 2 groups"):
        last_rates({"warmup_min_lr": [0.1, 0.2, 0.3]})
