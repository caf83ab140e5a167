"""The command: exit codes and messages on wrong usage and bad input."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from cli_run import finetune, run

from conftest import VOCAB, write_tokenizer


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "VERB"),
        (["finetun"], "finetun"),
        (["finetune", "--learning-rte", "1"], "did you mean 'learning_rate'"),
        (["finetune", "learning_rte=1"], "did you mean 'learning_rate'"),
        (["finetune", "stray"], "neither a .yaml or .json file nor KEY=VALUE"),
        (["finetune", "missing.yaml"], "missing.yaml"),
        (["finetune"], "--model is missing"),
        (["finetune", "--model", "m"], "--data is missing"),
        (["finetune", "--model", "m", "--data", "d"], "--output is missing"),
        (["finetune", "--lr", "fast"], "lr"),
        (["finetune", "--model", "m", "--data", "d", "--output", ""], "output: '' is empty"),
        (["finetune", "--model", "m", "--data", "", "--output", "o"], "data: '' is empty"),
        (["plan", "--model", "m", "--ranks", "99999999999"], "--ranks: '99999999999' is above 2147483647"),
        (["plan", "--model", "m", "--ranks", "0"], "--ranks: '0' is below 1"),
        (["bench", "io", "--size", "much"], "--size: 'much' is not a number of bytes"),
        (["bench", "io", "--pairs", "0"], "--pairs: '0' is below 1"),
        (["export", "--in", "a", "--out", "b", "--max-shard-size", "x"], "--max-shard-size: 'x' is not"),
        (["plan", "--model", "m", "--seed", "9" * 23], "seed: "),
        (["plan", "--model", "m", "--steps", "1e30"], "steps: '1e30' is above"),
        (["plan", "--model", "m", "--host-mem", "99999999TB"], "host_mem: '99999999TB' is above"),
        (["eval", "--save-every", "3"], "does not belong to this verb"),
        (["plan"], "--model is missing"),
        (["inspect", "nowhere"], "no such file"),
        (["export", "--in", "x"], "--out"),
        (["doctor", "--path", "nowhere"], "no such folder"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, argv, part):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert part in err
    assert err.startswith("orlop: error: ")
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_help_and_version_print_and_succeed(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in ("finetune", "eval", "plan", "export", "inspect", "bench", "doctor", "plot", "config"):
        assert verb in out
    assert run(capsys, "--version")[1].startswith("orlop ")
    code, out, _ = run(capsys, "finetune", "--help")
    assert code == 0
    assert "--per-device-train-batch-size" in out
    for choices in ("--schedule cosine|linear|constant|wsd", "--activations device|host|nvme"):
        assert choices in out


def edit_json(path, **changes):
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def rewrite_weights(model, change):
    """change(tensors) edits the name -> array mapping in place."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def truncate(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(model):
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def overlapping(model):
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def trailing_byte(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

BAD_MODELS = {
    "no config": (lambda m: (m / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda m: (m / "config.json").write_text("{"), "config.json"),
    "unknown architecture": (
        lambda m: edit_json(m / "config.json", model_type="mamba", architectures=["MambaForCausalLM"]),
        "mamba",
    ),
    "missing field": (lambda m: edit_json(m / "config.json", hidden_size=None), "hidden_size"),
    "wrong field": (lambda m: edit_json(m / "config.json", num_hidden_layers="three"), "num_hidden_layers"),
    "heads do not divide": (
        lambda m: edit_json(m / "config.json", num_key_value_heads=3),
        "num_key_value_heads",
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "safetensors"),
    "truncated weights": (truncate, "model.safetensors"),
    "oversized header": (huge_header, "model.safetensors"),
    "overlapping tensors": (overlapping, "model.safetensors"),
    "trailing byte": (trailing_byte, "model.safetensors"),
    "missing tensor": (lambda m: rewrite_weights(m, lambda t: t.pop(Q_PROJ)), Q_PROJ),
    "extra tensor": (
        lambda m: rewrite_weights(m, lambda t: t.update(extra=np.zeros(3, np.float32))),
        "extra",
    ),
    "wrong shape": (
        lambda m: rewrite_weights(m, lambda t: t.update({Q_PROJ: np.zeros((48, 47), np.float32)})),
        Q_PROJ,
    ),
    "NaN weights": (lambda m: rewrite_weights(m, lambda t: t[Q_PROJ].__setitem__((1, 2), np.nan)), Q_PROJ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_model_is_refused_by_name(capsys, own_model, text_file, tmp_path, name):
    damage, part = BAD_MODELS[name]
    damage(own_model)
    before = {p.name: p.read_bytes() for p in own_model.iterdir()}
    code, _, err = finetune(capsys, own_model, text_file, tmp_path / "run")
    assert code == 4, err
    assert part in err
    assert not list((tmp_path / "run").glob("step-*"))
    assert {p.name: p.read_bytes() for p in own_model.iterdir()} == before


def write(path, data):
    path.write_bytes(data)
    return path


BAD_DATA = {
    "empty": ("d.txt", b"", "no token to learn from"),
    "not text": ("d.txt", b"\xff\xfe", "at byte 0"),
    "bad line": ("d.jsonl", b'{"text": "a"}\n{"text"', "d.jsonl:2"),
    "wrong field": ("d.jsonl", b'{"txt": "a"}', "d.jsonl:1"),
    "brackets without end": ("d.jsonl", b'{"text": "a"}\n' + b"[" * 99999, "d.jsonl:2: not JSON"),
    "a number of many digits": (
        "d.jsonl",
        b'{"text": "a", "id": ' + b"1" * 5000 + b"}",
        "d.jsonl:1: not JSON",
    ),
    "half a surrogate pair": (
        "d.jsonl",
        b'{"text": "a \\ud800"}',
        "d.jsonl:1: holds half of a surrogate pair (\\ud800)",
    ),
    "half a pair in a chat": (
        "d.jsonl",
        b'{"messages": [{"role": "assistant", "content": "\\udc00"}]}',
        "d.jsonl:1: holds half of a surrogate pair (\\udc00)",
    ),
    "a table": ("d.json", b'[{"text": "a"}]', "per line (.jsonl)"),
    "no token file": ("d.tok", b"ORLOPTOX" + bytes(100), "d.tok"),
    "truncated token file": ("d.tok", b"ORLOPTOK" + struct.pack("<II6Q", 1, 2, 99, 320, 0, 0, 0, 0), "d.tok"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_by_file(capsys, model_dir, tmp_path, name):
    file_name, content, part = BAD_DATA[name]
    data = write(tmp_path / file_name, content)
    code, _, err = finetune(capsys, model_dir("llama"), data, tmp_path / "run")
    assert code == 4, err
    assert part in err
    assert data.read_bytes() == content


def test_a_run_is_not_written_over_a_model_nor_among_its_data(
    capsys, own_model, model_dir, text_file, tmp_path
):
    def refused(*extra):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code, out, err = finetune(capsys, model_dir("llama"), text_file, tmp_path / "run", *extra)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return err

    assert f"--output {own_model}: is the folder of a model" in refused("--output", own_model)
    (tmp_path / "link").symlink_to(own_model)
    assert "is the folder of a model" in refused("--model", own_model, "--output", tmp_path / "link")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hf").symlink_to(own_model)
    assert f"--model {own_model}: is where the run would export to" in refused("--model", own_model)
    for folder in (tmp_path, tmp_path / "run" / "data"):
        folder.mkdir(exist_ok=True)
        assert f"--data {folder}: is where the run writes" in refused("--data", folder)
        assert f"--data {folder}: is where the run writes" in refused("--eval-data", folder)
    beside = tmp_path / "data"
    beside.mkdir()
    text_file.rename(beside / "text.txt")
    code, _, err = finetune(capsys, own_model, beside, tmp_path / "run", "--export", "false")
    assert (code, err) == (0, "")


def test_a_device_as_data_holds_no_text(capsys, model_dir, tmp_path):
    code, _, err = finetune(capsys, model_dir("llama"), "/dev/null", tmp_path / "run")
    assert (code, "/dev/null: holds no text" in err) == (4, True)


@pytest.mark.parametrize("value", [b"null", b'"abc"'])
def test_a_model_without_a_number_of_tokens_is_one_line(capsys, own_model, text_file, tmp_path, value):
    path = own_model / "config.json"
    path.write_bytes(path.read_bytes().replace(b'"vocab_size": 320', b'"vocab_size": ' + value))
    code, _, err = finetune(capsys, own_model, text_file, tmp_path / "run")
    assert (code, f"{path}: vocab_size: " in err, len(err.splitlines())) == (4, True, 1)


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"model": null, "seq_len": 16}', b"\xff", b"[" * 9999])
def test_export_names_a_run_config_that_is_none(capsys, model_dir, text_file, tmp_path, content):
    model, run_dir = model_dir("llama"), tmp_path / "run"
    assert finetune(capsys, model, text_file, run_dir, "--save-every", 2, "--export", "false")[0] == 0
    path = run_dir / "config.json"
    path.write_bytes(content)
    arguments = ("export", "--in", run_dir, "--out", tmp_path / "out")
    code, _, err = run(capsys, *arguments)
    assert (code, f"{path}: " in err, len(err.splitlines())) == (4, True, 1)
    if content.startswith(b'{"'):
        assert "pass --model" in err
        assert run(capsys, *arguments, "--model", model)[0] == 0


def test_missing_data_is_wrong_usage(capsys, model_dir, tmp_path):
    code, _, err = finetune(capsys, model_dir("llama"), tmp_path / "none.txt", tmp_path / "run")
    assert (code, "none.txt: no such file" in err) == (2, True)


def test_a_tokenizer_beyond_the_vocabulary_is_refused(capsys, own_model, tmp_path):
    write_tokenizer(own_model, vocab=VOCAB)
    edit_json(own_model / "config.json", vocab_size=VOCAB - 60)
    data = tmp_path / "d.txt"
    data.write_text("the heavy stores lie in the lowest deck of the ship")
    code, _, err = finetune(capsys, own_model, data, tmp_path / "run")
    assert code == 4
    assert str(VOCAB - 60) in err


def test_a_sequence_longer_than_the_model_is_refused(capsys, model_dir, text_file, tmp_path):
    code, _, err = finetune(capsys, model_dir("llama"), text_file, tmp_path / "run", "--seq-len", 129)
    assert code == 2
    assert "129" in err and "128" in err


@pytest.mark.parametrize("verb", ["finetune", "plan"])
def test_a_budget_too_small_is_exit_code_3_with_the_remedy(capsys, model_dir, text_file, tmp_path, verb):
    extra = ["--data", text_file, "--output", tmp_path / "run"] if verb == "finetune" else []
    code, _, err = run(
        capsys,
        verb,
        "--model",
        model_dir("llama"),
        "--device",
        "host",
        "--seq-len",
        16,
        "--device-mem",
        "10KB",
        *extra,
    )
    assert code == 3
    assert "device" in err
    assert not list((tmp_path / "run").glob("step-*"))


def test_an_output_that_cannot_be_a_folder_is_an_error(capsys, model_dir, text_file, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = finetune(capsys, model_dir("llama"), text_file, tmp_path / "file" / "run")
    assert code == 1
    assert "file/run" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("damage", [truncate, huge_header])
def test_inspect_refuses_damaged_files(capsys, own_model, damage):
    damage(own_model)
    code, _, err = run(capsys, "inspect", own_model / "model.safetensors")
    assert code == 4
    assert "model.safetensors" in err


def test_a_damaged_checkpoint_names_the_others(capsys, model_dir, text_file, tmp_path):
    run_dir = tmp_path / "run"
    extra = ("--save-every", 1, "--steps", 3, "--export", "false")
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, *extra)[0] == 0
    states = run_dir / "step-3" / "optim" / "rank-0.safetensors"
    content = states.read_bytes()
    states.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = finetune(capsys, model_dir("llama"), text_file, run_dir, *extra, "--steps", 4)
    others = f"--resume {run_dir / 'step-2'} or {run_dir / 'step-1'}\n"
    assert (code, f"{states}' is damaged" in err, err.endswith(others)) == (4, True, True), err
    resume = ("--steps", 4, "--resume", run_dir / "step-2")
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, *extra, *resume)[0] == 0
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, *extra, "--steps", 5)[0] == 0


@pytest.mark.parametrize("steps", [-2, 3, 10**20])
def test_a_manifest_that_disagrees_about_its_step_is_refused(capsys, model_dir, text_file, tmp_path, steps):
    run_dir = tmp_path / "run"
    extra = ("--save-every", 2, "--export", "false")
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, *extra)[0] == 0
    path = run_dir / "step-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state"]["steps"] = steps
    path.write_text(json.dumps(manifest))
    code, _, err = finetune(capsys, model_dir("llama"), text_file, run_dir, *extra, "--steps", 4)
    assert (code, f"{path}': the training state has " in err, "is of step 2" in err) == (4, True, True), err


REFUSED_RUNS = {
    "optimizer": (("--optim", "adam"), 2),
    "budget": (("--device-mem", "10KB"), 3),
    "model": (("--model", "gpt2"), 4),
    "data": (("--seed", 3, "--lr", 0.5), 2),
}


@pytest.mark.parametrize("name", REFUSED_RUNS)
def test_a_refused_run_leaves_the_run_folder_to_export(capsys, model_dir, text_file, tmp_path, name):
    extra, expected = REFUSED_RUNS[name]
    extra = [model_dir(word) if word == "gpt2" else word for word in extra]
    run_dir = tmp_path / "run"
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, "--save-every", 2)[0] == 0
    before = (run_dir / "config.json").read_bytes()
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, "--steps", 3, *extra)[0] == expected
    assert (run_dir / "config.json").read_bytes() == before
    code, _, err = run(capsys, "export", "--in", run_dir, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", run_dir / "hf")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "content", [b"{", b"{}", b"[]", b"\xff", b'{"weight_map": ["a"]}', b'{"weight_map": {"a": 1}}']
)
def test_inspect_refuses_a_damaged_index(capsys, tmp_path, content):
    path = write(tmp_path / "model.safetensors.index.json", content)
    code, out, err = run(capsys, "inspect", path)
    assert (code, out, f"{path}: " in err, len(err.splitlines())) == (4, "", True, 1)


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_inspect_refuses_a_damaged_manifest(capsys, own_model, content):
    path = write(own_model / "manifest.json", content)
    code, out, err = run(capsys, "inspect", own_model)
    assert (code, out, f"{path}: " in err, len(err.splitlines())) == (4, "", True, 1)
