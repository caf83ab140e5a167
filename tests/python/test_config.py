"""Options: spellings, values, files, what is refused and how."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orlop.config import OPTIONS, RunConfig, canonical_name, parse_bytes, read_config_file
from orlop.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("193MB", 193_000_000), ("22GiB", 22 * 2**30), ("4g", 4 * 2**30), ("1.5 kb", 1500), (17, 17), ("0", 0)],
)
def test_bytes_are_read_with_their_unit(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "12 apples", "-3MB", "MB", "1e3", None])
def test_bytes_without_sense_are_refused(text):
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from(["", "b", "B"]))
def test_plain_bytes_come_back_exactly(count, unit):
    assert parse_bytes(f"{count}{unit}") == count


@pytest.mark.parametrize(
    ("hugging_face", "short"),
    [
        ("model_name_or_path", "model"),
        ("output_dir", "out"),
        ("learning_rate", "lr"),
        ("per_device_train_batch_size", "micro-batch"),
        ("gradient_accumulation_steps", "accum"),
        ("max_steps", "steps"),
        ("num_train_epochs", "epochs"),
        ("lr_scheduler_type", "schedule"),
        ("max_grad_norm", "clip"),
        ("max_seq_length", "seq-len"),
        ("gpu_mem", "device-mem"),
        ("save_steps", "save-every"),
        ("save_total_limit", "keep"),
        ("eval_steps", "eval-every"),
        ("resume_from_checkpoint", "resume"),
        ("weight_decay", "wd"),
        ("gradient_wire", "grad-wire"),
    ],
)
def test_both_spellings_name_one_option(hugging_face, short):
    assert canonical_name(hugging_face) == canonical_name(f"--{short}")


def test_no_spelling_names_two_options():
    spellings = [s for option in OPTIONS.values() for s in (option.name, *option.aliases)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    ("wrong", "right"), [("learning_rte", "learning_rate"), ("--sed-len", "seq_len"), ("acum", "accum")]
)
def test_an_unknown_option_names_the_nearest(wrong, right):
    with pytest.raises(UsageError, match=f"did you mean '{right}'"):
        RunConfig({wrong: 1})


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("lr", "fast", "lr"),
        ("lr", "nan", "not finite"),
        ("lr", -1, "below 0"),
        ("steps", 0, "below 1"),
        ("steps", 1.5, "whole number"),
        ("steps", True, "whole number"),
        ("schedule", "cubic", "cosine, linear, constant, wsd"),
        ("optim", "muon", "adamw, adam"),
        ("bf16", "perhaps", "neither true nor false"),
        ("warmup_ratio", 1.2, "within 0..1"),
        ("device_mem", "lots", "number of bytes"),
    ],
)
def test_a_wrong_value_names_option_and_value(key, value, part):
    with pytest.raises(UsageError, match=part) as caught:
        RunConfig({key: value})
    assert key in str(caught.value)


def test_one_option_under_two_spellings_is_refused():
    with pytest.raises(UsageError, match="same option"):
        RunConfig({"lr": 1e-4, "learning_rate": 1e-4})


def test_precision_by_flags_and_by_name():
    assert RunConfig().precision == "bf16"
    assert RunConfig({"fp16": True}).precision == "fp16"
    assert RunConfig({"bf16": False}).precision == "bf16"
    assert RunConfig({"precision": "fp32"}).precision == "fp32"
    with pytest.raises(UsageError, match="bf16 and as fp16"):
        RunConfig({"fp16": True, "bf16": True})


def test_later_values_win_and_are_marked_explicit():
    config = RunConfig({"lr": 1e-4})
    config.update({"learning_rate": 3e-4, "seed": None}, "command line")
    assert config.lr == 3e-4
    assert config.explicit == {"lr"}


def test_the_run_folder_config_reads_back():
    config = RunConfig({"lr": 1e-4, "device_mem": "10MB", "data": ["a.txt"], "fp16": True})
    again = RunConfig(json.loads(json.dumps(config.as_dict())))
    assert again.as_dict() == config.as_dict()


def test_yaml_with_sections(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\noptimizer:\n  lr: 1e-4\n  weight_decay: 0.1\nlimits: {gpu_mem: 193MB}\n")
    config = RunConfig(read_config_file(path))
    assert (config.model, config.lr, config.weight_decay, config.device_mem) == ("m", 1e-4, 0.1, 193_000_000)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.yaml", "lr: [1", "a.yaml"),
        ("a.yaml", "- lr", "mapping"),
        ("a.json", "{", "a.json"),
        ("a.yaml", "lr: 1\nx: {lr: 2}", "twice"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, part):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=part):
        read_config_file(path)
