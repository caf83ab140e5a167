"""The Python API of the engine: placement changes nothing, states, checkpoints, export, errors."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import orlop
from conftest import VOCAB

STEPS = 20
STATES = (orlop.StateKind.MASTER, orlop.StateKind.EXP_AVG, orlop.StateKind.EXP_AVG_SQ)


def make_config(**overrides) -> orlop.EngineConfig:
    values = {
        "device": "host",
        "precision": orlop.Precision.BF16,
        "batch": orlop.BatchConfig(micro_batch_size=2, sequence_length=32, accumulation_steps=2),
        "optimizer": orlop.OptimizerConfig(learning_rate=1e-3, weight_decay=0.1),
        "schedule": orlop.ScheduleConfig(warmup_steps=3, total_steps=STEPS),
    }
    return orlop.EngineConfig(**(values | overrides))


def run_steps(engine, loader, count: int) -> list[tuple[float, float]]:
    """(loss, norm) per step."""
    accumulation = engine.config.batch.accumulation_steps
    results = [engine.step([loader.next() for _ in range(accumulation)]) for _ in range(count)]
    return [(r.loss, r.grad_norm) for r in results]


def all_states(engine) -> dict[tuple[str, str], bytes]:
    return {
        (t.name, kind.name): engine.read_state(t.name, kind).tobytes()
        for t in engine.tensors()
        for kind in STATES
    }


def train(folder, token_file, config):
    loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
    with orlop.Engine.open(str(folder), config) as engine:
        return run_steps(engine, loader, STEPS), all_states(engine), engine.plan.resident_blocks


def smallest_budget(folder) -> int:
    config = make_config(
        placement=orlop.PlacementConfig(resident_blocks=0, prefetch_depth=0, device_optimizer_blocks=0)
    )
    return orlop.plan(str(folder), config).device_peak_bytes


@pytest.fixture(scope="module")
def resident_run(model_dir, token_file):
    return train(model_dir("llama"), token_file, make_config())


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_prefetch_depth_changes_no_bit(model_dir, token_file, resident_run, prefetch):
    placement = orlop.PlacementConfig(resident_blocks=0, prefetch_depth=prefetch)
    losses, states, resident = train(model_dir("llama"), token_file, make_config(placement=placement))
    assert resident == 0
    assert losses == resident_run[0]
    assert states == resident_run[1]


@pytest.mark.parametrize("share", [1.0, 1.2, 1.6])
def test_device_budget_changes_no_bit(model_dir, token_file, resident_run, share):
    budget = int(smallest_budget(model_dir("llama")) * share)
    config = make_config(limits=orlop.LimitsConfig(device_bytes=budget))
    losses, states, _ = train(model_dir("llama"), token_file, config)
    assert losses == resident_run[0]
    assert states == resident_run[1]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_optimizer_states_repeat_for_any_thread_count(model_dir, token_file, threads):
    config = make_config(threads=threads, reference_ops=True, precision=orlop.Precision.F32)
    one = make_config(threads=1, reference_ops=True, precision=orlop.Precision.F32)
    assert train(model_dir("llama"), token_file, config) == train(model_dir("llama"), token_file, one)


def test_the_budget_is_kept(model_dir, token_file):
    budget = smallest_budget(model_dir("llama"))
    config = make_config(limits=orlop.LimitsConfig(device_bytes=budget))
    loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
    with orlop.Engine.open(str(model_dir("llama")), config) as engine:
        run_steps(engine, loader, 2)
        assert engine.stats().device_peak_bytes <= budget
        assert engine.plan.device_peak_bytes <= budget


def test_a_budget_that_is_too_small_is_refused_with_numbers(model_dir):
    config = make_config(limits=orlop.LimitsConfig(device_bytes=1000))
    with pytest.raises(orlop.DoesNotFitError, match=r"device") as caught:
        orlop.plan(str(model_dir("llama")), config)
    assert caught.value.exit_code == 3
    assert any(character.isdigit() for character in str(caught.value))


def test_evaluation_touches_no_state(model_dir, token_file):
    config = make_config()
    with orlop.Engine.open(str(model_dir("llama")), config) as engine:
        loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
        run_steps(engine, loader, 2)
        before = all_states(engine)
        batches = [loader.next(), loader.next()]
        first = engine.evaluate(batches)
        assert engine.evaluate(batches).loss == first.loss
        assert all_states(engine) == before
        assert first.labelled_tokens == sum(int((b.labels != orlop.IGNORED_LABEL).sum()) for b in batches)


def test_load_in_the_process_that_saved_goes_back(model_dir, token_file, tmp_path):
    config = make_config()
    with orlop.Engine.open(str(model_dir("llama")), config) as engine:
        loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
        run_steps(engine, loader, 5)
        position = loader.position()
        folder = engine.save_checkpoint(str(tmp_path), "hello", 3)
        states = all_states(engine)
        first = run_steps(engine, loader, 5)
        assert engine.load_checkpoint(folder) == "hello"
        assert engine.steps_done == 5
        assert all_states(engine) == states
        loader.seek(position)
        assert run_steps(engine, loader, 5) == first


def test_a_checkpoint_loads_into_another_placement(model_dir, token_file, tmp_path):
    straight = make_config()
    with orlop.Engine.open(str(model_dir("llama")), straight) as engine:
        loader = orlop.DataLoader(str(token_file), straight.batch, seed=1, shuffle=True)
        run_steps(engine, loader, 4)
        folder = engine.save_checkpoint(str(tmp_path), "", 3)
        position = loader.position()
        expected = run_steps(engine, loader, 4)
    offloaded = make_config(placement=orlop.PlacementConfig(resident_blocks=0, prefetch_depth=1))
    with orlop.Engine.open(str(model_dir("llama")), offloaded) as engine:
        engine.load_checkpoint(folder)
        loader.seek(position)
        assert run_steps(engine, loader, 4) == expected


def test_checkpoints_hold_json_and_safetensors_only(model_dir, token_file, tmp_path):
    from safetensors import safe_open

    config = make_config()
    with orlop.Engine.open(str(model_dir("llama")), config) as engine:
        loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
        for _ in range(3):
            run_steps(engine, loader, 1)
            folder = engine.save_checkpoint(str(tmp_path), "", 2)
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["step-2", "step-3"]
        assert orlop.Engine.latest_checkpoint(str(tmp_path)) == folder
    files = [p for p in (tmp_path / "step-3").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".json", ".safetensors"}
    json.loads((tmp_path / "step-3" / "manifest.json").read_text())
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="numpy") as file:
                assert list(file.keys())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_loads_the_export_with_the_same_loss(model_dir, token_file, tmp_path, kind, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import reference

    config = make_config(precision=orlop.Precision.F32)
    source = model_dir(kind, tied)
    with orlop.Engine.open(str(source), config) as engine:
        loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
        run_steps(engine, loader, 5)
        batches = [loader.next() for _ in range(4)]
        loss = engine.evaluate(batches).loss
        engine.export_hf(str(tmp_path / "hf"))
        weights = {t.name: engine.read_state(t.name) for t in engine.tensors()}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert reference.eval_loss(model, batches) == pytest.approx(loss, rel=1e-5)
    state = model.state_dict()
    for name, values in weights.items():
        np.testing.assert_array_equal(values, state[name].numpy(), err_msg=name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()
    transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")


def test_export_without_a_step_gives_back_the_weights(model_dir, tmp_path):
    from safetensors.numpy import load_file

    source = model_dir("llama", False)
    config = make_config(precision=orlop.Precision.F32)
    with orlop.Engine.open(str(source), config) as engine:
        engine.export_hf(str(tmp_path / "hf"), max_shard_bytes=20_000)
    shards = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 1
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    exported = {name: values for shard in shards for name, values in load_file(shard).items()}
    original = load_file(source / "model.safetensors")
    assert set(index["weight_map"]) == set(exported) == set(original)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in exported.values())
    for name, values in original.items():
        np.testing.assert_array_equal(exported[name], values, err_msg=name)


def test_two_engines_live_beside_each_other(model_dir, token_file):
    config = make_config()

    def losses(folder):
        loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
        with orlop.Engine.open(str(folder), config) as engine:
            return run_steps(engine, loader, 4)

    alone = [losses(model_dir("llama")), losses(model_dir("gpt2"))]
    loaders = [orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True) for _ in range(2)]
    with orlop.Engine.open(str(model_dir("llama")), config) as a:
        with orlop.Engine.open(str(model_dir("gpt2")), config) as b:
            together = [run_steps(a, loaders[0], 2), run_steps(b, loaders[1], 4)]
        together[0] += run_steps(a, loaders[0], 2)
    assert together == alone


def test_steps_let_other_python_threads_run(model_dir, token_file):
    config = make_config(
        batch=orlop.BatchConfig(micro_batch_size=4, sequence_length=128, accumulation_steps=16)
    )
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(1e-4)

    with orlop.Engine.open(str(model_dir("llama")), config) as engine:
        loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
        batches = [loader.next() for _ in range(16)]
        thread = threading.Thread(target=tick)
        thread.start()
        time.sleep(0.01)
        before = ticks
        engine.step(batches)
        during = ticks - before
        done.set()
        thread.join()
    assert during > 0


def test_a_closed_engine_raises(model_dir):
    engine = orlop.Engine.open(str(model_dir("llama")), make_config())
    engine.close()
    with pytest.raises(orlop.UsageError, match="closed"):
        engine.stats()
    engine.close()


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_a_token_beyond_the_vocabulary_is_refused(model_dir, token):
    config = make_config(batch=orlop.BatchConfig(sequence_length=8))
    tokens = np.zeros(8, np.int32)
    tokens[5] = token
    with (
        orlop.Engine.open(str(model_dir("llama")), config) as engine,
        pytest.raises(orlop.Error, match=str(token)) as caught,
    ):
        engine.step([orlop.MicroBatch(tokens, np.zeros(8, np.int32))])
    assert caught.value.exit_code == 4 or isinstance(caught.value, orlop.UsageError)


def test_exit_codes_agree_with_the_library():
    from orlop import _orlop
    from orlop.errors import BY_CODE

    assert _orlop._exit_codes() == {code: cls.exit_code for code, cls in BY_CODE.items()}


def test_a_name_that_the_config_lacks_is_refused():
    with pytest.raises(AttributeError):
        orlop.OptimizerConfig(learning_rte=1e-4)


def test_the_trace_is_chrome_json(model_dir, token_file, tmp_path):
    config = make_config(placement=orlop.PlacementConfig(resident_blocks=0, prefetch_depth=1))
    with orlop.Engine.open(str(model_dir("llama")), config) as engine:
        engine.start_trace()
        loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
        run_steps(engine, loader, 2)
        engine.write_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert any(event["ph"] == "X" for event in events)


def test_exit_while_work_runs(model_dir, token_file, tmp_path):
    """The interpreter ends while an update, a background save and writes to a drive run, with and without a
    reference to the engine."""
    (tmp_path / "drive").mkdir()
    code = f"""
import orlop
config = orlop.EngineConfig(
    device="host",
    batch=orlop.BatchConfig(micro_batch_size=2, sequence_length=32, accumulation_steps=1),
    placement=orlop.PlacementConfig(nvme_optimizer_blocks=2),
    nvme=orlop.NvmeConfig(paths=[{str(tmp_path / "drive")!r}]),
)
loader = orlop.DataLoader({str(token_file)!r}, config.batch, seed=1, shuffle=True)
engine = orlop.Engine.open({str(model_dir("llama"))!r}, config)
engine.step([loader.next()])
engine.save_checkpoint({str(tmp_path / "run")!r}, "", 1, orlop.SaveMode.BACKGROUND)
engine.step([loader.next()])
"""
    for end in ("", "del engine", "engine.close()", "keep = [engine]; keep.append(keep)") * 3:
        done = subprocess.run(
            [sys.executable, "-c", f"{code}{end}\nprint('end', flush=True)"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", ""), end
    assert not list((tmp_path / "drive").glob("*.swap")), "files of ended runs"
