"""orlop.wrap and what comes to a wrapped model later: adapters, compilers, packed weights, checkpoints.

On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import prune  # noqa: E402
from wrap_model import DEVICE, Model, assert_same, batch, streamed, train, weights  # noqa: E402

import orlop  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402

pytestmark = pytest.mark.any_device


def assert_same_weights(model, reference):
    got, wanted = weights(model), weights(reference)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


# --- adapters after the wrap --------------------------------------------------------------------


class Lora(torch.nn.Module):
    """As libraries of adapters do, reads shape, dtype and device of the layer that it goes around."""

    def __init__(self, base, rank=3):
        super().__init__()
        self.base = base.requires_grad_(False)
        rows, columns = base.weight.shape
        assert base.weight.numel() == rows * columns and base.weight.dim() == 2
        place = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = torch.nn.Parameter(
            torch.randn(rank, columns, generator=torch.Generator().manual_seed(rows)).to(**place)
        )
        self.up = torch.nn.Parameter(torch.zeros(rows, rank, **place))

    def forward(self, x):
        return self.base(x) + torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def layered(dtype=torch.float32):
    model = Model(dtype=dtype)
    for index in range(5):
        model.blocks[index] = Layer().to(DEVICE, dtype)
    return model


def put_adapters(model):
    """Around one layer of each block, and around both of the third."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.first = Lora(block.first)
    model.blocks[2].second = Lora(model.blocks[2].second)
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("through", ["optimizer of its own", "add_param_group"])
def test_adapters_around_layers_of_a_wrapped_model(dtype, through):
    """Case M-06: sizes are those of the weights that are away; the base stays, the adapters train as on the plain
    model."""

    limits = {"limits": {"gpu": 2 * 1200 * dtype.itemsize}}

    def run(wrapped):
        model = layered(dtype)
        if not wrapped:
            return model, orlop.AdamW(put_adapters(model), lr=1e-2, gradients="leave")
        hyper = {"lr": 1e-2} if through == "add_param_group" else None
        model, optimizer = orlop.wrap(model, hyper, limits)
        if optimizer is None:
            return model, orlop.AdamW(put_adapters(model), lr=1e-2, gradients="leave", module=model)
        optimizer.add_param_group({"params": put_adapters(model)})
        return model, optimizer

    reference, reference_optimizer = run(False)
    model, optimizer = run(True)
    base = {name: value for name, value in weights(model).items() if ".base." in name}
    assert train(model, optimizer) == train(reference, reference_optimizer)
    assert_same_weights(model, reference)
    after = weights(model)
    assert all(torch.equal(after[name], value) for name, value in base.items())
    assert stream_of(model).peak_blocks == 2 and stream_of(model).resident_blocks() == []
    assert all(p.grad is None for name, p in model.named_parameters() if ".base." in name)


def with_adapters(folder, wrapped, drive=None, **options):
    """Around a model that is wrapped, with the weights in host memory or on a drive, or not."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
    if wrapped:
        nvme = {} if drive is None else {"nvme": {"paths": [drive], "slot": "64KiB", "param_share": 1.0}}
        model, _ = orlop.wrap(model, config={"limits": {"gpu": "300KiB"}, **nvme})
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def test_peft_around_a_wrapped_model(model_dir):
    """Case M-06."""
    peft = pytest.importorskip("peft")

    def run(wrapped):
        adapted = with_adapters(model_dir("llama", True), wrapped).train()
        trained = [p for p in adapted.parameters() if p.requires_grad]
        assert sum(p.numel() for p in trained) > 0
        optimizer = orlop.AdamW(trained, lr=1e-2)
        losses = []
        for step in range(5):
            tokens = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(step)).to(DEVICE)
            loss = adapted(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, peft.get_peft_model_state_dict(adapted)

    (losses, adapter), (expected, wanted) = run(True), run(False)
    assert losses == expected and losses[-1] < losses[0]
    assert adapter.keys() == wanted.keys() and len(adapter) == 2 * 7 * 3
    assert all(torch.equal(adapter[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("where", ["host", "nvme"])
def test_merged_adapters_over_a_wrapped_base(model_dir, tmp_path, where, safe_merge):
    """Case M-06: merge_and_unload() adds to weights that are away as to any."""

    def logits(wrapped):
        drive = tmp_path if where == "nvme" else None
        adapted = with_adapters(model_dir("llama", True), wrapped, drive, init_lora_weights=False)
        merged = adapted.merge_and_unload(safe_merge=safe_merge)
        with torch.no_grad():
            return merged(torch.arange(12, device=DEVICE)[None]).logits

    assert torch.equal(logits(True), logits(False))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "pruned"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_hooks_of_a_block_that_make_its_weights(kind):
    """What torch's older utilities put on a block itself, before the wrap, finds the weights there."""

    def make():
        model = Model()
        for block in model.blocks:
            torch.manual_seed(1)
            if kind == "pruned":
                prune.l1_unstructured(block, "weight", 0.3)
            else:
                getattr(torch.nn.utils, kind)(block)
        return model

    assert_same(make=make)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p[0, 0].item(),
        lambda p: p.tolist(),
        lambda p: p.numpy(),
        lambda p: torch.linalg.norm(p),
        lambda p: p.clone(),
        lambda p: p.t() @ p,
        lambda p: torch.zeros(24, 24, device=DEVICE).copy_(p),
        lambda p: torch.nn.init.normal_(p),
    ],
    ids=["item", "tolist", "numpy", "norm", "clone", "matmul", "source", "init"],
)
def test_values_that_are_away_are_refused_by_name(use):
    """Case M-06: never an empty tensor, and what to do instead."""
    model, _ = streamed(Model())
    before = weights(model)
    with pytest.raises(orlop.UsageError, match=r"blocks\.3\.weight: .*`with orlop\.gathered\(\.\.\.\):`"):
        use(model.blocks[3].weight)
    with orlop.gathered([model.blocks[3].weight]), torch.no_grad():
        assert torch.equal(model.blocks[3].weight.cpu(), before["blocks.3.weight"])


# --- compiled blocks ----------------------------------------------------------------------------


def compile_blocks(model, backend):
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "used", "after"])
def test_state_dict_of_compiled_blocks(backend, when, tmp_path):
    """Case M-09: ten steps, keys as without a compiler, and what was saved goes on in another compiled model."""

    def make():
        model = layered()
        if when != "after":
            compile_blocks(model, backend)
        if when == "used":  # what was compiled without the hooks of the wrap is of no use any more
            model(batch(0)).sum().backward()
            model.zero_grad()
        model, optimizer = orlop.wrap(model, {"lr": 1e-2}, {"limits": {"gpu": 2 * 4 * 1200}})
        if when == "after":
            compile_blocks(model, backend)
        return model, optimizer

    reference = layered()
    reference_optimizer = orlop.AdamW(reference.parameters(), lr=1e-2, gradients="leave")
    expected = train(reference, reference_optimizer, 10)
    model, optimizer = make()
    torch.testing.assert_close(train(model, optimizer, 10), expected, atol=0, rtol=0.01)
    assert list(model.state_dict()) == list(reference.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    other, other_optimizer = make()
    saved = torch.load(tmp_path / "state.pt")
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert train(other, other_optimizer, 3, first=10) == train(model, optimizer, 3, first=10)
    reference.load_state_dict(saved["model"])


def renamed_block(model):
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model


def whole(model):
    return torch.compile(model, backend="eager")


def whole_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("how", [renamed_block, whole, whole_in_place])
def test_compiled_otherwise_is_refused(how):
    """Case M-09: what would rename weights, or trace the coming and going of blocks, says so at the wrap."""
    torch._dynamo.reset()
    model = how(Model())
    with pytest.raises(orlop.UsageError, match=r"compile.*block\.compile\(\)"):
        orlop.wrap(model, {"lr": 1e-2})
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}


# --- packed and mixed weights -------------------------------------------------------------------


class Packed(torch.nn.Module):
    """A frozen linear layer with two 4-bit codes in each byte, and an adapter in bf16."""

    def __init__(self, width, seed):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        packed = torch.randint(0, 256, (width, width // 2), dtype=torch.uint8, generator=random)
        self.packed = torch.nn.Parameter(packed, requires_grad=False)
        self.zero_point = torch.nn.Parameter(
            torch.randint(-8, 8, (width,), dtype=torch.int8, generator=random), requires_grad=False
        )
        self.order = torch.nn.Parameter(torch.randperm(width, generator=random), requires_grad=False)
        self.register_buffer("scale", torch.rand(width, 1, generator=random) * 0.02)
        self.register_buffer("code", torch.linspace(-1, 1, 16))
        self.down = torch.nn.Parameter(torch.randn(2, width, generator=random).mul(0.1).bfloat16())
        self.up = torch.nn.Parameter(torch.zeros(width, 2, dtype=torch.bfloat16))

    def weight(self):
        codes = torch.stack([self.packed & 15, self.packed >> 4], dim=-1).flatten(1).long()
        return ((self.code[codes] + self.zero_point[:, None] / 8) * self.scale)[self.order].bfloat16()

    def forward(self, x):
        linear = torch.nn.functional.linear
        return linear(x, self.weight()) + linear(linear(x, self.down), self.up)


class PackedModel(torch.nn.Module):
    def __init__(self, width=32, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width, dtype=torch.bfloat16).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Packed(width, seed) for seed in range(blocks))
        self.to(DEVICE)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


def packed_bytes(model):
    return {
        name: value.cpu().clone()
        for name, value in model.state_dict().items()
        if not name.endswith(("up", "down"))
    }


@pytest.mark.parametrize("handed_over", ["all", "adapters"])
def test_packed_base_with_adapters(handed_over):
    """Cases M-10, M-01: packed weights come and go byte by byte, their metadata is there; only adapters have gradients
    and states; forward and losses have the bits of the run without offload."""
    reference = PackedModel()
    reference_optimizer = orlop.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=1e-2, gradients="leave"
    )
    model = PackedModel()
    before = packed_bytes(model)
    limits = {"limits": {"gpu": 2 * 1100}}
    if handed_over == "all":
        model, optimizer = orlop.wrap(model, {"lr": 1e-2}, limits)
    else:
        adapters = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = orlop.wrap(model, torch.optim.AdamW(adapters, lr=1e-2), limits)
    with torch.no_grad():
        assert torch.equal(model(batch(0, torch.bfloat16)), reference(batch(0, torch.bfloat16)))
    for p in model.blocks[1].parameters():
        assert (p.shape, p.dtype) == (
            reference.get_parameter(_name(model, p)).shape,
            reference.get_parameter(_name(model, p)).dtype,
        )
    assert train(model, optimizer) == train(reference, reference_optimizer)
    after = packed_bytes(model)
    assert all(
        torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items()
    )
    assert_same_weights(model, reference)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert optimizer.memory_report()["moments"] == 8 * trained
    assert stream_of(model).peak_blocks == 2 and stream_of(model).resident_blocks() == []
    with pytest.raises(orlop.UsageError, match=r"blocks\.1\.packed"):
        _ = model.blocks[1].packed + 1
    fresh, _ = orlop.wrap(PackedModel(), config=limits)
    with orlop.gathered(fresh, write=True), torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(batch(1, torch.bfloat16)), reference(batch(1, torch.bfloat16)))


def _name(model, parameter):
    return next(name for name, p in model.named_parameters() if p is parameter)


FORMATS = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.float64,
]


class Mixed(torch.nn.Module):
    def __init__(self, shift):
        super().__init__()
        for index, dtype in enumerate(FORMATS[shift:] + FORMATS[:shift]):
            floating = dtype in FORMATS[:3]
            values = torch.randn(5, 3, generator=torch.Generator().manual_seed(index)).mul(20)
            self.register_parameter(
                f"w{index}", torch.nn.Parameter(values.to(dtype), requires_grad=floating and index % 2 == 0)
            )

    def forward(self, x):
        return x + sum(p.float().mean() for p in self.parameters())


@pytest.mark.parametrize("optimizer", [{"lr": 1e-2}, None], ids=["trained", "evaluated"])
def test_mixed_formats_in_one_block(optimizer):
    """Case D-05: each comes back bit-identical with its own type, and so do gathered ones."""
    model = torch.nn.Sequential()
    model.blocks = torch.nn.ModuleList(Mixed(shift) for shift in range(len(FORMATS)))
    model.to(DEVICE)
    reference = copy.deepcopy(model)
    model, made = orlop.wrap(model, optimizer, {"limits": {"gpu": 2 * 600}})
    assert_same_weights(model, reference)
    for block, other in zip(model.blocks, reference.blocks, strict=True):
        with torch.no_grad():
            assert torch.equal(block(torch.ones(2, device=DEVICE)), other(torch.ones(2, device=DEVICE)))
        with orlop.gathered(block):
            for p, q in zip(block.parameters(), other.parameters(), strict=True):
                assert p.dtype == q.dtype and torch.equal(p, q)
    if made is not None:
        block, other = model.blocks[1], reference.blocks[1]
        reference_optimizer = orlop.AdamW(reference.parameters(), lr=1e-2)
        for module, o in ((block, made), (other, reference_optimizer)):
            module(torch.ones(2, device=DEVICE)).sum().backward()
            o.step()
    assert_same_weights(model, reference)


# --- the optimizer goes first -------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("states", ["auto", "host"])
@pytest.mark.parametrize("limit", [4800, 1 << 30], ids=["streamed", "resident"])
def test_weights_outlive_the_optimizer(limit, states, closes):
    """A function that trains and returns the model alone leaves it whole."""

    def trained():
        model, optimizer = orlop.wrap(Model(), {"lr": 1e-2, "states": states}, {"limits": {"gpu": limit}})
        train(model, optimizer)
        if closes:
            optimizer.close()
        return model

    reference = Model()
    train(reference, orlop.AdamW(reference.parameters(), lr=1e-2, gradients="leave"))
    model = trained()
    gc.collect()
    assert_same_weights(model, reference)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), reference(batch(0)))
    orlop.unwrap(model)
    assert_same_weights(model, reference)
    train(*orlop.wrap(model, {"lr": 1e-2}), 1)
