"""Trainer, Accelerate and PEFT with orlop.AdamW."""

from __future__ import annotations

import sys
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import orlop  # noqa: E402
import orlop.hf  # noqa: E402
from orlop.torch_support import TORCH_VERSION  # noqa: E402

OURS = (orlop.AdamW, {"lr": 1e-3})
RESUMES = pytest.mark.skipif(
    TORCH_VERSION < (2, 6), reason="transformers reads optimizer.pt from PyTorch 2.6 on"
)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        ids = torch.randint(0, 32, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def make_trainer(folder, out, steps=12, **options):
    transformers.set_seed(0)
    optimizer = options.pop("optimizer", None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=options.pop("dtype", torch.float32)
    )
    args = transformers.TrainingArguments(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"learning_rate": 1e-3, "gradient_accumulation_steps": 2, "save_strategy": "no", **options},
    )
    return transformers.Trainer(
        model, args, train_dataset=Data(), eval_dataset=Data(), optimizer_cls_and_kwargs=optimizer
    )


def log(trainer):
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def assert_close(ours, theirs):
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", ["class", "leave", "attach"])
def test_trainer_equals_torch(model_dir, tmp_path, way):
    """Losses and norms (before clipping at the Trainer's default of 1.0), with accumulation and schedule."""
    folder = model_dir("llama", True)
    expected = make_trainer(folder, tmp_path / "a", optimizer=(torch.optim.AdamW, {"lr": 1e-3}))
    expected.train()
    kwargs = {"lr": 1e-3, "gradients": "leave"} if way == "leave" else {"lr": 1e-3}
    trainer = make_trainer(
        folder, tmp_path / "b", optimizer=None if way == "attach" else (orlop.AdamW, kwargs)
    )
    if way == "attach":
        assert orlop.hf.attach(trainer) is trainer
    trainer.train()
    assert isinstance(orlop.hf.unwrap(trainer.optimizer), orlop.AdamW)
    assert_close(log(trainer), log(expected))
    if way == "attach":
        assert trainer.state.log_history[0]["orlop_skipped_steps"] == 0
        assert trainer.state.log_history[0]["orlop_host_gib"] >= 0.0005


@RESUMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attached", [False, True])
def test_trainer_checkpoint_resumes_exactly(model_dir, tmp_path, attached, dtype):
    """Six steps, a checkpoint, a new Trainer: the weights after twelve are those of a straight run."""

    def trainer(out, **options):
        made = make_trainer(
            model_dir("llama", True), out, dtype=dtype, optimizer=None if attached else OURS, **options
        )
        return orlop.hf.attach(made) if attached else made

    straight = trainer(tmp_path / "straight", save_strategy="steps", save_steps=6)
    straight.train()
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-6"))
    assert log(resumed)[-6:] == log(straight)[-6:]
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(straight), strict=True))


@RESUMES
def test_checkpoint_of_torch_resumes(model_dir, tmp_path):
    """optimizer.pt of a Trainer with torch's AdamW."""
    folder = model_dir("llama", True)
    theirs = (torch.optim.AdamW, {"lr": 1e-3})
    straight = make_trainer(folder, tmp_path / "a", optimizer=theirs, save_strategy="steps", save_steps=6)
    straight.train()
    resumed = make_trainer(folder, tmp_path / "b", optimizer=OURS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert_close(log(resumed)[-6:], log(straight)[-6:])


def test_evaluation_and_best_model(model_dir, tmp_path):
    """Loading the best weights while an update is hidden waits for it."""
    trainer = make_trainer(
        model_dir("llama", True), tmp_path, eval_strategy="steps", eval_steps=3, save_strategy="steps",
        save_steps=3, load_best_model_at_end=True,
    )  # fmt: skip
    orlop.hf.attach(trainer)
    trainer.train()
    best = transformers.AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    trained = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in best.named_parameters())


@pytest.mark.parametrize("converted", [False, True])
def test_accelerate_loop(model_dir, converted):
    """prepare(), accumulate(), backward() and clip_grad_norm_() of an Accelerator."""

    def run(make):
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir("gpt2", True))
        model, optimizer = make(accelerator, model)
        losses = []
        for i in range(10):
            with accelerator.accumulate(model):
                batch = {key: value[None] for key, value in Data()[i].items()}
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def theirs(accelerator, model):
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def ours(accelerator, model):
        if converted:
            return orlop.hf.prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        return accelerator.prepare(model, orlop.AdamW(model.parameters(), lr=1e-3))

    assert_close(run(ours), run(theirs))


def test_lora(model_dir):
    """Cases M-01, C-15: host bytes follow the adapter, 50 losses equal torch's, the frozen base keeps its bits."""
    peft = pytest.importorskip("peft")

    def run(make):
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir("llama", True))
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(base, config)
        optimizer = make(model)
        losses = []
        for i in range(50):
            loss = model(**{key: value[None] for key, value in Data()[i % 8].items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    expected, _, _ = run(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    got, model, optimizer = run(lambda m: orlop.AdamW(m.parameters(), lr=1e-3, module=m))
    assert max(abs(a - b) / b for a, b in zip(got, expected, strict=True)) <= 0.01
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert optimizer.memory_report()["moments"] == 8 * trainable
    original = transformers.AutoModelForCausalLM.from_pretrained(model_dir("llama", True)).state_dict()
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    for name, p in frozen:
        assert torch.equal(p, original[name.removeprefix("base_model.model.").replace(".base_layer", "")])


def test_other_optimizers_are_refused_by_name():
    """Case U-02: the refusal lists what is accepted."""
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(orlop.UsageError, match=r"SGD.*torch\.optim\.AdamW"):
        orlop.AdamW.from_torch(torch.optim.SGD([p], lr=0.1))


def test_torch_optimizer_taken_over_in_the_middle():
    """Hyperparameters, groups and state of a torch optimizer."""
    p, q = (torch.nn.Parameter(torch.linspace(1, 2, 9)) for _ in range(2))
    reference = torch.optim.AdamW([{"params": [p], "lr": 0.1, "weight_decay": 0.3}], betas=(0.8, 0.9))
    other = torch.optim.AdamW([{"params": [q], "lr": 0.1, "weight_decay": 0.3}], betas=(0.8, 0.9))
    for step in range(8):
        for x, o in ((p, reference), (q, other)):
            (x * (step + 1)).sin().sum().backward()
            o.step()
            o.zero_grad()
        if step == 3:
            other = orlop.AdamW.from_torch(other)
    torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


def test_a_trainer_with_optimizer_and_scheduler_of_its_own(model_dir, tmp_path):
    """The scheduler that was made over the optimizer sets the rate of the one in its place."""

    def run(name, attaches):
        trainer = make_trainer(model_dir("llama", True), tmp_path / name, steps=6)
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
        trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.2)
        if attaches:
            orlop.hf.attach(trainer)
        trainer.train()
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        return log(trainer), rates

    expected, rates = run("a", False)
    losses, ours = run("b", True)
    assert ours == pytest.approx(rates) and ours[0] < 1e-6
    assert_close(losses, expected)


def test_a_trainer_that_would_not_use_the_optimizer_is_refused(model_dir, tmp_path):
    """Before transformers 4.47 it makes one of its own, whatever it is told."""
    trainer = make_trainer(model_dir("llama", True), tmp_path)
    del trainer.optimizer_cls_and_kwargs
    with pytest.raises(orlop.UsageError, match=r"transformers 4\.47 or newer"):
        orlop.hf.attach(trainer)


@pytest.fixture
def axolotl(monkeypatch):
    """Axolotl, or, where it is not installed, the name that the plug-in needs of it."""
    try:
        import axolotl.integrations.base  # noqa: F401
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = object


@pytest.mark.usefixtures("axolotl")
def test_axolotl_plugin(model_dir, tmp_path):
    """The plug-in's groups are those of the Trainer: decay for matrices only."""
    from orlop.integrations.axolotl import Plugin

    trainer = make_trainer(model_dir("llama", True), tmp_path, weight_decay=0.1)
    trainer.optimizer = Plugin().create_optimizer({}, trainer)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    assert all(p.ndim == 1 for p in trainer.optimizer.param_groups[1]["params"])
    trainer.train()
    assert trainer.optimizer is not None and len(log(trainer)) == 12


@pytest.mark.parametrize("given", ["arguments", "class", "ours", "trained"])
def test_attach_keeps_what_the_trainer_was_given(model_dir, tmp_path, given):
    """Hyperparameters of optimizer_cls_and_kwargs count, and so does an optimizer that has trained already."""
    hyper = {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-6}
    classes = {"class": (torch.optim.Adam, hyper | {"fused": True}), "ours": (orlop.Adam, hyper)}

    def trainer(name):
        options = {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
        kind = (torch.optim.Adam, hyper) if given in classes else None
        made = make_trainer(
            model_dir("llama", True),
            tmp_path / name,
            steps=4,
            optimizer=classes.get(given, kind) if name == "ours" else kind,
            **({} if given in classes else options),
        )
        if given == "trained":
            made.train()
        return made

    expected, attached = trainer("theirs"), orlop.hf.attach(trainer("ours"))
    for each in (expected, attached):
        each.train()
    assert type(orlop.hf.unwrap(attached.optimizer)) is (orlop.Adam if given in classes else orlop.AdamW)
    assert_close(log(attached), log(expected))


@pytest.mark.parametrize("way", ["name", "class"])
def test_attach_refuses_other_optimizers(model_dir, tmp_path, way):
    options = {"optim": "adafactor"} if way == "name" else {"optimizer": (torch.optim.SGD, {"lr": 0.1})}
    trainer = make_trainer(model_dir("llama", True), tmp_path, **options)
    with pytest.raises(orlop.UsageError, match=r"adafactor.*adamw_torch" if way == "name" else r"SGD.*AdamW"):
        orlop.hf.attach(trainer)


def test_options_that_come_too_late_are_refused(model_dir, tmp_path):
    trainer = make_trainer(model_dir("llama", True), tmp_path)
    trainer.optimizer = orlop.AdamW(trainer.model.parameters())
    with pytest.raises(orlop.UsageError, match=r"orlop\.AdamW already, which takes moments"):
        orlop.hf.attach(trainer, moments="bf16")
    with pytest.raises(orlop.UsageError, match=r"orlop\.AdamW already, which takes moments"):
        orlop.hf.prepare(trainer.accelerator, trainer.model, trainer.optimizer, moments="bf16")
    orlop.hf.attach(trainer)


def test_attach_follows_a_model_that_is_made_anew(model_dir, tmp_path):
    """model_init gives every train() another model: it is that one's forward that waits for the update."""
    folder = model_dir("llama", True)
    args = make_trainer(folder, tmp_path, steps=4).args
    trainer = transformers.Trainer(
        args=args,
        train_dataset=Data(),
        model_init=lambda: transformers.AutoModelForCausalLM.from_pretrained(folder),
    )
    orlop.hf.attach(trainer)
    for _ in range(2):
        trainer.train()
        optimizer = orlop.hf.unwrap(trainer.optimizer)
        assert optimizer._module is trainer.model


def test_attach_keeps_the_settings_of_the_scaler(model_dir, tmp_path):
    trainer = make_trainer(model_dir("llama", True), tmp_path)
    settings = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
    scaler = orlop.hf.attach(trainer).accelerator.scaler
    assert isinstance(scaler, orlop.GradScaler) and scaler.get_scale() == 8.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (4.0, 0.25)
    assert scaler.get_growth_interval() == 7
