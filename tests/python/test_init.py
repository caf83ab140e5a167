"""orlop.init: models are built and loaded in host memory, each weight once, and orlop.wrap takes that memory over.

On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, batch, train, weights  # noqa: E402

import orlop  # noqa: E402
from orlop import deepspeed_compat as deepspeed  # noqa: E402

pytestmark = pytest.mark.any_device

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


class Model(torch.nn.Module):
    """Weights drawn in several ways, two of them one, one with a dtype of its own, one from another default."""

    def __init__(self, inner=None):
        super().__init__()
        with default_dtype(inner) if inner else contextlib.nullcontext():
            self.inp = torch.nn.Linear(8, 24)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(4))
            self.out = torch.nn.Linear(24, 4)
            self.tied = torch.nn.Linear(8, 24)
            self.tied.weight = self.inp.weight
        for block in self.blocks:
            torch.nn.init.trunc_normal_(block.weight, std=0.2)
            block.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float32))
        self.register_buffer("shift", torch.full((4,), 0.25, dtype=torch.float32))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.out(x) + self.shift.to(x.dtype)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def built(context, **arguments):
    torch.manual_seed(3)
    with context:
        model = Model(**arguments)
    return model, torch.get_rng_state()


def assert_equal(model, expected):
    got, wanted = weights(model), weights(expected)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


# --- building -----------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("inner", [None, torch.float32])
def test_weights_are_those_of_plain_construction(dtype, inner):
    """Case M-12: the same random numbers, whatever default dtype a library sets inside; a dtype of its own stays."""
    expected, state_after = built(default_dtype(dtype))
    model, state = built(orlop.init(dtype=dtype), inner=inner)
    assert_equal(model, expected)
    assert torch.equal(state, state_after)
    assert model.blocks[0].scale.dtype == torch.float32 and model.shift.dtype == torch.float32
    assert model.tied.weight is model.inp.weight
    assert torch.get_default_dtype() == torch.float32


def test_host_memory_whatever_the_default_device_is():
    expected, _ = built(contextlib.nullcontext())
    with torch.device("meta" if DEVICE == "cpu" else DEVICE):
        model, _ = built(orlop.init())
        outside = torch.nn.Linear(1, 1)
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert outside.weight.device.type != "cpu"
    assert_equal(model, expected)


def test_nothing_is_left_after_a_failure():
    with pytest.raises(ZeroDivisionError), orlop.init(dtype=torch.bfloat16):
        _ = 1 / 0
    assert torch.nn.Linear(1, 1).weight.dtype == torch.float32
    with orlop.init(dtype=torch.float16):
        with orlop.init(dtype=torch.bfloat16):
            assert torch.nn.Linear(1, 1).weight.dtype == torch.bfloat16
        assert torch.nn.Linear(1, 1).weight.dtype == torch.float16
        assert isinstance(torch.nn.LazyLinear(1).weight, torch.nn.parameter.UninitializedParameter)
    with pytest.raises(orlop.UsageError, match="int8"), orlop.init(dtype=torch.int8):
        pass


@DTYPES
def test_wrapped_training_is_that_of_the_plain_model(dtype):
    def run(context, make):
        model, _ = built(context)
        model, optimizer = make(model)
        return train(model, optimizer, 6), model, optimizer

    expected, plain, _ = run(default_dtype(dtype), lambda m: plain_training(m.to(DEVICE)))
    losses, model, _optimizer = run(
        orlop.init(dtype=dtype), lambda m: orlop.wrap(m, {"lr": 1e-2}, device=DEVICE)
    )
    assert losses == expected
    assert_equal(model, plain)
    assert model.shift.device.type == torch.device(DEVICE).type
    assert model.tied.weight is model.inp.weight


def plain_training(model):
    return model, orlop.AdamW(model.parameters(), lr=1e-2, gradients="leave")


# --- the memory is taken over -------------------------------------------------------------------


def test_the_memory_of_the_weights_is_their_home():
    """Without an optimizer there is no copy at all."""
    with orlop.init():
        model = Model()
    expected = weights(model)
    address = {name: p.data_ptr() for name, p in model.blocks.named_parameters()}
    model, _ = orlop.wrap(model, device=DEVICE, config={"limits": {"gpu": 2 * 2404}})
    homes = {name: p.detach() for name, p in model.blocks.named_parameters()}
    assert {name: home.data_ptr() for name, home in homes.items()} == address
    with torch.no_grad():
        model(batch(0))
    assert_same_values(weights(model), expected)
    with orlop.gathered(model.blocks[1], write=True), torch.no_grad():
        model.blocks[1].weight.mul_(2.0)
    assert torch.equal(weights(model)["blocks.1.weight"], 2 * expected["blocks.1.weight"])


def assert_same_values(got, expected):
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_part_of_something_larger_is_copied():
    """Such as a mapped file, which may change or go afterwards."""
    model = Model()
    expected = weights(model)
    whole = torch.cat([model.blocks[1].weight.detach().flatten(), torch.zeros(7)])
    model.blocks[1].weight.data = whole[:-7].view(24, 24)
    model, _ = orlop.wrap(model, device=DEVICE, config={"limits": {"gpu": 2 * 2404}})
    whole.fill_(torch.nan)
    assert_same_values(weights(model), expected)


def test_zero_init_shares_the_way():
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    expected, _ = built(default_dtype(torch.bfloat16))
    with torch.device("meta" if DEVICE == "cpu" else DEVICE):
        model, _ = built(deepspeed.zero.Init(config_dict_or_path=config), inner=torch.float32)
        other, _ = built(deepspeed.zero.Init(config_dict_or_path=config, enabled=False))
    assert_equal(model, expected)
    assert other.inp.weight.dtype == torch.float32 and other.inp.weight.device.type != "cpu"


# --- transformers -------------------------------------------------------------------------------


def llama(tied):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=tied,
    )  # fmt: skip


TOKENS = torch.arange(24).view(2, 12)


def loss_of(model):
    tokens = TOKENS.to(DEVICE)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("tied", [True, False])
def test_from_config(tied):
    """Cases M-12, N-16: first loss and, after steps, files are those of the plain model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(llama(tied), dtype=torch.bfloat16)
    torch.manual_seed(0)
    with orlop.init(dtype=torch.bfloat16):
        model = AutoModelForCausalLM.from_config(llama(tied))
    assert_equal(model, expected)
    expected.to(DEVICE)
    model, optimizer = orlop.wrap(model, {"lr": 1e-3}, {"limits": {"gpu": "200KiB"}}, device=DEVICE)
    for (name, buffer), (_, wanted) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert buffer.device == wanted.device and torch.equal(buffer, wanted), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(loss_of(model), loss_of(expected))
    loss_of(model).backward()
    optimizer.step()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
@DTYPES
def test_from_pretrained(model_dir, tmp_path, tied, dtype):
    """Case M-15: loaded weights are those of the plain loading in that dtype, and saved ones come in the same files."""
    from transformers import AutoModelForCausalLM

    folder = model_dir("llama", tied)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with orlop.init(dtype=dtype):
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert_equal(model, expected)
    model, _ = orlop.wrap(model, {"lr": 1e-3}, {"limits": {"gpu": "200KiB"}}, device=DEVICE)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(loss_of(model), loss_of(expected.to(DEVICE)))
    model.save_pretrained(tmp_path / "got", max_shard_size="100KB")
    expected.save_pretrained(tmp_path / "wanted", max_shard_size="100KB")
    names = sorted(os.listdir(tmp_path / "wanted"))
    assert len(names) > 3 and sorted(os.listdir(tmp_path / "got")) == names
    _, different, failed = filecmp.cmpfiles(tmp_path / "got", tmp_path / "wanted", names, shallow=False)
    assert not different and not failed


def test_the_file_is_not_needed_any_more(model_dir, tmp_path):
    """Weights of blocks are no views of it once the model is wrapped, whatever is written there."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model_dir("llama", False)).save_pretrained(tmp_path)
    with orlop.init():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model, _ = orlop.wrap(model, config={"limits": {"gpu": "200KiB"}}, device=DEVICE)
    before = weights(model.model.layers)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (tmp_path / "model.safetensors").stat().st_size)
    assert_same_values(weights(model.model.layers), before)


# --- memory -------------------------------------------------------------------------------------

_PHASES = """
import json, os, sys
import torch
sys.path.insert(0, os.environ["TESTS"])
from transformers import AutoModelForCausalLM, LlamaConfig
import orlop
from memory_use import Peak

def config(width, layers):
    return LlamaConfig(vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                       num_attention_heads=8, num_key_value_heads=8)

def make(how, *arguments):
    with orlop.init(dtype=torch.bfloat16):
        return how(*arguments)

peaks = {}

def measure(name, work):
    with Peak() as peak:
        result = work()
    peaks[name], peaks[name + " after"] = peak.bytes, peak.left
    return result

small, optimizer = orlop.wrap(make(AutoModelForCausalLM.from_config, config(64, 1)), {"lr": 1e-3})  # what imports take
folder = sys.argv[1]
model = measure("built", lambda: make(AutoModelForCausalLM.from_config, config(512, 8)))
peaks["weights"] = sum(p.nbytes for p in model.parameters())
model, optimizer = measure("wrapped", lambda: orlop.wrap(model, {"lr": 1e-3}))
peaks["states"] = sum(optimizer.memory_report().values())
measure("saved", lambda: model.save_pretrained(folder))
state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
measure("state loaded", lambda: model.load_state_dict(state))
optimizer.close()
del model, optimizer, state
model = measure("file loaded", lambda: make(AutoModelForCausalLM.from_pretrained, folder))
model, _ = measure("evaluated", lambda: orlop.wrap(model))
model = measure("file loaded again", lambda: make(AutoModelForCausalLM.from_pretrained, folder))
model, optimizer = measure("trained", lambda: orlop.wrap(model, {"lr": 1e-3}))
drives = {"nvme": {"paths": [folder + "/drive"], "slot": "1MiB", "param_share": 1}}
model = measure("file loaded for drives", lambda: make(AutoModelForCausalLM.from_pretrained, folder))
model, _ = measure("on drives", lambda: orlop.wrap(model, config=drives))
print(json.dumps(peaks))
"""


def test_weights_are_in_memory_once(tmp_path):
    """Case C-05: what each phase takes at its highest, beyond what the process had before it. Of what becomes the
    optimizer's no more than a room of 256 MiB of states, here weights of 43 MiB, exists twice for a moment."""
    process = subprocess.run(
        [sys.executable, "-c", _PHASES, str(tmp_path)],
        env={**os.environ, "TESTS": os.path.dirname(__file__)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    peaks = json.loads(process.stdout.splitlines()[-1])
    weights, states, room, slack = peaks["weights"], peaks["states"], 43 << 20, 16 << 20
    assert peaks["built"] <= weights + slack, peaks
    # States have a copy of the weights in them.
    assert peaks["wrapped"] <= states - weights + room + slack, peaks
    assert peaks["wrapped after"] <= states - weights + slack, peaks
    assert peaks["saved"] <= slack and peaks["state loaded"] <= slack, peaks
    assert peaks["file loaded"] + peaks["evaluated"] <= weights + slack, peaks
    assert peaks["evaluated after"] >= weights - slack, peaks  # the file is not needed any more
    assert peaks["file loaded again"] + peaks["trained"] <= states + slack, peaks
    # Slots for three of eight blocks: a model that host memory cannot hold goes from its file to drives.
    assert peaks["file loaded for drives"] + peaks["on drives"] <= weights * 3 // 8 + slack, peaks
