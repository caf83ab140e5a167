"""DeepSpeed configurations: the reader, the grades of all keys, the rules between keys. No torch."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest

import orlop
from orlop import cli
from orlop.deepspeed_config import DeepSpeedConfig, explain
from orlop.deepspeed_keys import KEYS, REFUSED_OPTIMIZERS, REFUSED_SCHEDULERS, REFUSED_SECTIONS, SCHEDULERS
from orlop.hjson_reader import read_hjson


def nested(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def read(**values):
    return DeepSpeedConfig.read(values)


# --- the reader -----------------------------------------------------------------------------------


def test_hjson():
    text = """
    # comment
    {
      // comment
      "a": 5e8, b: -3   /* comment */
      c: plain text
      "d": [1, 2.5, 'single', true
            null]
      e: {}, f: [], "g,{": "x # no comment // either \\u00e9",
    }
    """
    assert read_hjson(text, "t") == {
        "a": 5e8, "b": -3, "c": "plain text", "d": [1, 2.5, "single", True, None], "e": {}, "f": [],
        "g,{": "x # no comment // either \u00e9",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/mnt//a", "/mnt//a"),
        ("/mnt/b  # all of it", "/mnt/b  # all of it"),
        ("x#1, y}] ", "x#1, y}]"),
        ("5 rows", "5 rows"),
        ("01", "01"),
        ("nullable", "nullable"),
        ("5#x", 5),
        ("-5e-1 // x", -0.5),
        ("true/* x */", True),
        ("null ,", None),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_string_without_quotes_is_its_line(text, expected, end):
    """As in Hjson: only after a number, true, false and null may a comma or a comment follow."""
    found = read_hjson(end.join(("\ufeff{", f"a: {text}", "b: 1", "}")), "t")
    assert found == {"a": expected, "b": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "1: 'a' is given twice"),
        ('{"a": {"b": 1\n "b": 2}}', "2: 'b' is given twice"),
        ('{"a": 1', "'}' is missing|expected"),
        ('{"a": [1, 2}', "expected"),
        ('{"a" 1}', "KEY: VALUE"),
        ('{"a": }', "a value is missing"),
        ('{"a": "x}', "no end"),
        ("[1]", "begins with"),
        ('{"a": 1} x', "after the end"),
        ("", "begins with"),
    ],
)
def test_broken_text_names_file_and_line(text, message):
    with pytest.raises(orlop.UsageError, match=f"f.json, line .*({message})"):
        read_hjson(text, "f.json")


def test_json_is_read_as_json_does():
    values = {"a": [1, -2.5e-3, '\\"x', None, True], "b": {"c": {}}, "d": ""}
    assert read_hjson(json.dumps(values), "t") == values
    assert read_hjson(json.dumps(values, indent=2), "t") == values


# --- sources --------------------------------------------------------------------------------------


def test_path_dict_and_base64_are_the_same(tmp_path):
    values = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(values))
    encoded = base64.urlsafe_b64encode(json.dumps(values).encode()).decode()
    results = [DeepSpeedConfig.read(source).as_dict() for source in (values, str(path), path, encoded)]
    assert all(result == results[0] for result in results)
    assert results[0]["train_micro_batch_size_per_gpu"] == 4
    with pytest.raises(orlop.UsageError, match=r"missing\.json: cannot be read"):
        DeepSpeedConfig.read("missing.json")


# --- grades ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.grade != "R"])
def test_default_of_every_key_is_accepted_and_reported(path):
    """As the default, and as "auto"; the Finding carries the grade."""
    default = KEYS[path].default
    for value in ("auto", default):
        if value is None or value == {}:
            continue
        config = DeepSpeedConfig.read(nested(path, value))
        assert [(f.path, f.grade) for f in config.findings] == [(path, KEYS[path].grade)]


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.grade == "R"])
def test_every_refused_key_is_refused_by_name(path):
    default = KEYS[path].default
    other = {bool: not default, int: 7, float: 0.5, str: "cpu"}.get(type(default), {"a": 1})
    with pytest.raises(orlop.UsageError, match=path.rsplit(".", 1)[-1]) as raised:
        DeepSpeedConfig.read(nested(path, other))
    assert "refused: " in str(raised.value)
    if default is not None:
        assert DeepSpeedConfig.read(nested(path, default)).findings[0].grade == "R"


@pytest.mark.parametrize("section", REFUSED_SECTIONS)
def test_refused_sections(section):
    with pytest.raises(orlop.UsageError, match=section):
        DeepSpeedConfig.read({section: {"enabled": True}})
    config = DeepSpeedConfig.read({section: {"enabled": False, "anything": 3}})
    assert {f.grade for f in config.findings} == {"R"}


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_refused_optimizers(name):
    with pytest.raises(orlop.UsageError, match=rf"{name}.*AdamW"):
        read(optimizer={"type": name})


@pytest.mark.parametrize("name", REFUSED_SCHEDULERS)
def test_refused_schedulers(name):
    with pytest.raises(orlop.UsageError, match=name):
        read(scheduler={"type": name})


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_refuse_parameters_they_lack(name):
    assert read(scheduler={"type": name, "params": {"warmup_num_steps": "auto"}}).scheduler_params()
    with pytest.raises(orlop.UsageError, match="cycle_min_lr"):
        read(scheduler={"type": name, "params": {"cycle_min_lr": 1}})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fp16.loss_scale", True),
        ("fp16.loss_scale", float("inf")),
        ("fp16.loss_scale", -1),
        ("fp16.enabled", 1),
        ("fp16.initial_scale_power", 2.5),
        ("gradient_clipping", "much"),
        ("train_batch_size", 0),
        ("train_batch_size", True),
        ("zero_optimization.stage", 4),
        ("zero_optimization.offload_optimizer.device", "nvme"),
        ("zero_optimization.offload_optimizer.device", "disk"),
        ("zero_optimization.offload_param.device", "nvme"),
        ("zero_optimization.offload_param", {"device": "cpu"}),
        ("data_types.grad_accum_dtype", "fp8"),
        ("optimizer.params.betas", 0.9),
        ("optimizer.params.betas", [0.9]),
        ("optimizer.params.betas", [0.9, 1.0]),
        ("optimizer.params.betas", ["auto", "auto"]),
        ("steps_per_print", float("-inf")),
        ("train_batch_size", float("inf")),
        ("compat", "0.1"),
    ],
)
def test_values_that_cannot_work(path, value):
    with pytest.raises(orlop.UsageError, match=path):
        DeepSpeedConfig.read(nested(path, value))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("warmup_max_lr", "much", "float or list is needed"),
        ("warmup_max_lr", -1, "finite number from 0"),
        ("warmup_max_lr", [0.1, None], r"\[1\] = None: float is needed"),
        ("warmup_min_lr", float("inf"), "finite number"),
        ("warmup_num_steps", 2.5, "int is needed"),
        ("warmup_num_steps", [1], "int is needed"),
        ("warmup_type", "cosine", "not one of log, linear"),
        ("total_num_steps", 0, "from 1"),
    ],
)
def test_scheduler_parameters_that_cannot_work(key, value, message):
    with pytest.raises(orlop.UsageError, match=rf"scheduler\.params\.{key}.*{message}"):
        read(scheduler={"type": "WarmupDecayLR", "params": {key: value}})


def test_values_of_the_scheduler_are_read_as_all_others():
    """Numbers in quotes, a rate per group, "auto"; None: the lr of the optimizer."""
    params = {
        "warmup_min_lr": "1e-5",
        "warmup_max_lr": [0.1, "1e-2"],
        "warmup_num_steps": "5e1",
        "_note": "x",
    }
    found = read(scheduler={"type": "WarmupLR", "params": params}).scheduler_params()
    assert found == {
        "warmup_min_lr": 1e-5, "warmup_max_lr": [0.1, 0.01], "warmup_num_steps": 50, "warmup_type": "log",
    }  # fmt: skip
    assert type(found["warmup_num_steps"]) is int
    for name, missing in (("WarmupLR", None), ("WarmupDecayLR", 1e-3)):
        assert read(scheduler={"type": name}).scheduler_params()["warmup_max_lr"] == missing
        auto = read(scheduler={"type": name, "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto"}})
        assert auto.scheduler_params()["warmup_max_lr"] is None
        assert auto.scheduler_params()["warmup_min_lr"] == 0.0


def test_betas_in_quotes_and_lines_that_never_come():
    assert read(optimizer={"params": {"betas": ["0.5", 0]}})["optimizer.params.betas"] == [0.5, 0.0]
    for endless in (float("inf"), "Infinity"):
        assert read(steps_per_print=endless)["steps_per_print"] is None


@pytest.mark.parametrize(
    ("values", "example"),
    [
        ({"fp16": True}, {"fp16": {"enabled": True}}),
        ({"bf16": "auto"}, {"bf16": {"enabled": False}}),
        ({"bfloat16": True}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": 2}, {"zero_optimization": {"stage": 2}}),
        ({"zero_optimization": {"offload_optimizer": "cpu"}},
         {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        ({"optimizer": "AdamW"}, {"optimizer": {"type": "AdamW"}}),
        ({"optimizer": ["AdamW"]}, {"optimizer": {"type": "..."}}),
        ({"scheduler": "WarmupLR"}, {"scheduler": {"type": "WarmupLR"}}),
        ({"csv_monitor": True}, {"csv_monitor": {"enabled": True}}),
    ],
)  # fmt: skip
def test_a_value_where_a_section_is_needed(values, example):
    with pytest.raises(orlop.UsageError, match="a section is needed") as raised:
        DeepSpeedConfig.read(values)
    assert str(raised.value).endswith(json.dumps(example))


def test_a_section_may_be_empty_or_null():
    assert read(fp16=None, scheduler={}, zero_optimization={"offload_param": None}).findings == []


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_parallel": {"autotp_size": 4}},
        {"tensor_parallel": {"tp": {"tp_size": 2}}},
        {"pipeline": {"stages": 4}},
        {"pipeline": {"stages": 4, "seed_layers": False}},
        {"sparse_attention": {"mode": "fixed"}},
        {"sparse_attention": {"block": 16}},
        {"quantize_training": {"quantize_bits": {"start_bits": 12}}},
        {"datastates_ckpt": {"host_cache_size": 16}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
    ],
    ids=str,
)
def test_refused_sections_that_ask_for_something(values):
    with pytest.raises(orlop.UsageError, match=f"{next(iter(values))}.* is refused"):
        DeepSpeedConfig.read(values)


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_parallel": {"autotp_size": 0, "preset_model": "llama"}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"pipeline": {"stages": "auto", "partition": "best", "seed_layers": False}},
        {"sparse_attention": {"mode": None, "block": 16}},
        {"sparse_attention": {}},
        {"quantize_training": {"enabled": False, "quantize_bits": {"start_bits": 12}}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "x": 3}}}},
        {"wandb": {"project": "x"}},
    ],
    ids=str,
)
def test_refused_sections_that_are_off(values):
    assert {finding.grade for finding in DeepSpeedConfig.read(values).findings} == {"R"}


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 4, None), (32, 4, 8)),
        ((32, None, 8), (32, 4, 8)),
        ((None, 4, 8), (32, 4, 8)),
        ((32, 4, 8), (32, 4, 8)),
        ((32, None, None), (32, 32, 1)),
        ((None, 4, None), (4, 4, 1)),
        (("auto", 4, "auto"), (4, 4, 1)),
    ],
)
def test_batch_rule(given, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = DeepSpeedConfig.read({n: v for n, v in zip(names, given, strict=True) if v is not None})
    assert tuple(config[name] for name in names) == expected


@pytest.mark.parametrize("given", [(32, 5, None), (32, 4, 7), (None, None, 8), (33, None, 8)])
def test_batches_that_do_not_multiply(given):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    with pytest.raises(orlop.UsageError, match="batch"):
        DeepSpeedConfig.read({n: v for n, v in zip(names, given, strict=True) if v is not None})


def test_both_spellings_and_old_names():
    config = read(
        bfloat16={"enabled": True}, zero_optimization={"max_live_parameters": 5e8, "cpu_offload": True}
    )
    assert config["bf16.enabled"] and config["zero_optimization.stage3_max_live_parameters"] == 5e8
    assert config["zero_optimization.offload_optimizer.device"] == "cpu"
    assert read(zero_optimization=True)["zero_optimization.stage"] == 1
    assert read(zero_optimization={"stage3_gather_fp16_weights_on_model_save": True})[
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ]
    old = "cpu_offload_use_pin_memory"
    assert [finding.path for finding in read(zero_optimization={old: True}).findings] == [
        f"zero_optimization.{old}"
    ]
    for both in ({"max_live_parameters": 1, "stage3_max_live_parameters": 1},
                 {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}):  # fmt: skip
        with pytest.raises(orlop.UsageError) as raised:
            read(zero_optimization=both)
        assert all(key in str(raised.value) for key in both)
    with pytest.raises(orlop.UsageError, match=r"bfloat16.*bf16"):
        read(bfloat16={}, bf16={})


def test_conflicts_name_both_keys():
    with pytest.raises(orlop.UsageError, match=r"fp16\.enabled.*bf16\.enabled"):
        read(fp16={"enabled": True}, bf16={"enabled": True})
    with pytest.raises(orlop.UsageError, match=r"bf16_optimizer_states.*bf16_master_weights_and_grads"):
        read(bf16={"bf16_optimizer_states": True})


def test_unknown_keys():
    """Reported at the top level, an error inside zero_optimization and with "strict"."""
    config = read(gradient_cliping=1.0)
    assert config.findings[0].grade == "?" and "gradient_clipping" in config.findings[0].text
    for values in ({"strict": True, "foo": 1}, {"zero_optimization": {"stgae": 2}}):
        with pytest.raises(orlop.UsageError, match="unknown key"):
            DeepSpeedConfig.read(values)
    assert read(zero_optimization={}, foo={}).findings[0].path == "foo"
    with pytest.raises(orlop.UsageError, match=r"offload_optimzer'; did you mean '.*offload_optimizer'"):
        read(zero_optimization={"offload_optimzer": {}})
    with pytest.raises(orlop.UsageError, match=r"params\.weight_decy'.*weight_decay"):
        read(optimizer={"type": "AdamW", "params": {"weight_decy": 0.1}})
    with pytest.raises(orlop.UsageError, match="'OneBitAdam' is refused"):
        read(optimizer={"params": {"freeze_step": 1}, "type": "OneBitAdam"})
    assert read(_comment="x", zero_optimization={"_note": 1}).findings[0].grade == "-"


@pytest.mark.parametrize(
    ("values", "near"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"fp16": {"enabeld": True}}, "fp16.enabled"),
        ({"optimizer": {"param": {"lr": 1}}}, "optimizer.params"),
        ({"stage": 3}, "zero_optimization.stage"),
        ({"enabled": True}, None),
        ({"mine": {"enabled": True}}, None),
    ],
)
def test_hints(values, near):
    """At the level of the first part that is unknown; else the only key of such a name."""
    (finding,) = DeepSpeedConfig.read(values).findings
    assert finding.text == "unknown, ignored" + (f"; did you mean {near!r}?" if near else "")


def test_defaults_of_releases():
    assert read()["gradient_clipping"] == 1.0 and read()["bf16.check_grad_overflow"]
    old = read(compat="0.18")
    assert old["gradient_clipping"] == 0.0 and not old["bf16.check_grad_overflow"]


def test_config_explain(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 8, // rows\n "zero_optimization": {"stage": 2}, "foo": 1, "gradient_clipping": 0}'
    )
    assert cli.main(["config", "explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == explain(DeepSpeedConfig.read(path))
    assert "?  foo" in out and "A  zero_optimization.stage" in out and "3 with the same meaning (A)" in out
    path.write_text('{"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}')
    assert cli.main(["config", "explain", str(path)]) == 2
    assert "zenflow" in capsys.readouterr().err
    own = tmp_path / "own.yaml"
    own.write_text("learning_rate: 1e-4\n")
    assert cli.main(["config", "explain", str(own)]) == 0
    out = capsys.readouterr().out
    assert f"0.0001  ({own})" in out and "(default)" in out


def test_the_dtype_of_communication_names_the_option_of_ranks():
    (finding,) = read(communication_data_type="bf16").findings
    assert finding.grade == "B" and "--grad-wire" in finding.text


def test_configuration_needs_no_torch():
    code = "import sys, orlop.deepspeed_config; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_brackets_without_end():
    with pytest.raises(orlop.UsageError, match=r"deep\.json.*too many brackets"):
        read_hjson('{"a": ' + "[" * 100_000, "deep.json")
