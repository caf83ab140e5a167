"""Options: spellings, values, files, what is refused and how."""

from __future__ import annotations

import json

import pytest
from cli_run import run
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


@given(st.integers(min_value=0, max_value=2**63 - 1), st.sampled_from(["", "b", "B"]))
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
        ("device_mem", "99999999TB", "above 9223372036854775807 bytes"),
        ("steps", "1e30", "above 2147483647"),
        ("steps", "1e999999999", "above 2147483647"),
        ("steps", "many", "whole number"),
        ("seed", 99999999999999999999999, "above 18446744073709551615"),
        ("seed", "inf", "whole number"),
        ("warmup_steps", -1, "below 0"),
        ("output", "", "is empty"),
        ("data", ["a.txt", ""], "is empty"),
    ],
)
def test_a_wrong_value_names_option_and_value(key, value, part):
    with pytest.raises(UsageError, match=part) as caught:
        RunConfig({key: value})
    assert key in str(caught.value)


@pytest.mark.parametrize("text", [2**53 + 1, str(2**64 - 1), f"{2**53 + 1}.0"])
def test_a_large_seed_keeps_every_digit(text):
    assert RunConfig({"seed": text}).seed == int(str(text).split(".", 1)[0])


@pytest.mark.parametrize("text", ["1e3", 1000, 1000.0, "1000"])
def test_a_whole_number_may_be_written_in_any_way(text):
    assert RunConfig({"steps": text}).steps == 1000


def test_more_steps_than_can_be_counted_are_refused():
    from orlop.engine_config import total_steps

    with pytest.raises(UsageError, match=r"--epochs 1e\+300.*at most 2147483647"):
        total_steps(RunConfig({"epochs": 1e300}), 10)


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
        ("a.yaml", "lr: 1\nseed: 2\nlr: 3", "'lr' is given twice"),
        ("a.json", '{"lr": 1, "seed": 2, "lr": 3}', "'lr' is given twice"),
        ("a.json", '{"optimizer": {"lr": 1, "lr": 3}}', "'lr' is given twice"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, text, part):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=part):
        read_config_file(path)


def test_yaml_may_override_what_it_merges(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: &short {lr: 1}\nx: {<<: *short, lr: 2}\n")
    with pytest.raises(UsageError, match="'lr' is given twice"):
        read_config_file(path)
    path.write_text("<<: {lr: 1, seed: 3}\nlr: 2\n")
    assert read_config_file(path) == {"lr": 2, "seed": 3}


def explain(capsys, path):
    code, out, err = run(capsys, "config", "explain", path)
    assert code == 0, err
    return out


OWN = '{"lr": 1e-4, "gradient_accumulation_steps": 2, "optimizer": {"beta1": 0.8}, "bf16": true}'
DEEPSPEED = '{"train_batch_size": 8, # rows\n fp16: {enabled: false}, bf16: {enabled: true}}'


@pytest.mark.parametrize("name", ["own.json", "own.yaml", "own", "own.hjson"])
def test_explain_takes_what_finetune_takes_as_orlops_own(capsys, tmp_path, name):
    path = tmp_path / name
    path.write_text(OWN)
    lines = {line.split()[0]: line.split()[1:] for line in explain(capsys, path).splitlines()}
    given = {name: words[0] for name, words in lines.items() if words[-1] == f"({path})"}
    assert given == {"lr": "0.0001", "accum": "2", "beta1": "0.8"}
    assert lines["precision"][0] == "'bf16'"


@pytest.mark.parametrize("name", ["ds.json", "ds.hjson", "ds"])
def test_explain_knows_a_deepspeed_file_by_its_keys(capsys, tmp_path, name):
    path = tmp_path / name
    path.write_text(DEEPSPEED)
    out = explain(capsys, path)
    assert "DeepSpeed configuration" in out and "A  bf16.enabled" in out


@pytest.mark.parametrize(
    ("name", "content", "code", "part"),
    [
        ("a.json", b'{"lr": 1, "lr": 2}', 2, "'lr' is given twice"),
        ("a.json", b'{"learning_rte": 1}', 2, "did you mean 'learning_rate'"),
        ("a.json", b'{"lr": "\xff"}', 4, "not UTF-8 text at byte 8"),
        ("a.yaml", b"lr: \xff", 4, "not UTF-8 text at byte 4"),
        ("a.hjson", b"\xff", 4, "not UTF-8 text at byte 0"),
    ],
)
def test_explain_names_the_fault_of_a_file(capsys, tmp_path, name, content, code, part):
    path = tmp_path / name
    path.write_bytes(content)
    found, out, err = run(capsys, "config", "explain", path)
    assert (found, out) == (code, "")
    assert err.startswith(f"orlop: error: {path}") and part in err and len(err.splitlines()) == 1
