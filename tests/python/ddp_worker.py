"""One rank of two under torch's DistributedDataParallel on the CPU: python ddp_worker.py RANK FOLDER. Goes through
the scenarios below and leaves what it saw of each in FOLDER/rank-RANK.pt, for test_ddp.py to compare."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import orlop

STEPS = 40
LIMIT = datetime.timedelta(seconds=60)
VOCAB = 29


class Blocks(nn.Module):
    """A tied embedding and blocks that are no multiple of a vector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 19)
        self.blocks = nn.ModuleList(nn.Linear(19, 19) for _ in range(3))
        self.head = nn.Linear(19, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.head(x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(8))

    def forward(self, x, chosen):
        return sum(self.experts[i](x) for i in chosen)


class Mixed(nn.Module):
    """Number formats in turn, some weights frozen, others of no elements, and a table of integers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        formats = (torch.float32, torch.bfloat16, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(9, 9, dtype=formats[i % 3]) for i in range(6))
        self.none = nn.Linear(4, 0)
        self.table = nn.Parameter(torch.arange(9), requires_grad=False)
        for i, p in enumerate(self.layers.parameters()):
            p.requires_grad_(i % 4 != 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().sum() + self.none(x[:, :4].float()).sum()


def loss_of(model, step, rank):
    ids = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def ddp(module, **options):
    return DistributedDataParallel(module, **options)


def both(module, hidden=False, **options):
    """The same module twice, each in a group of its own: under orlop.AdamW and under torch's."""
    ours, theirs = ddp(copy.deepcopy(module), **options), ddp(copy.deepcopy(module), **options)
    optimizer = staying(ours, ours if hidden else None)
    return (ours, optimizer), (theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3))


def staying(model, module=None, **options):
    return orlop.AdamW(model.parameters(), lr=1e-3, module=module, gradients="stay", **options)


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def finish(ours, theirs):
    (model, optimizer), (reference, _) = ours, theirs
    optimizer.synchronize()
    return {"ours": weights(model.module), "theirs": weights(reference.module)}


def train(rank, hidden=False, accumulation=1, **options):
    """Weights after training with clipping, and the norms of every step."""
    ours, theirs = both(Blocks(), hidden, **options)
    norms = {"ours": [], "theirs": []}
    for step in range(STEPS):
        for model, _ in (ours, theirs):
            with model.no_sync():
                for part in range(1, accumulation):
                    loss_of(model, step + 1000 * part, rank).backward()
            loss_of(model, step, rank).backward()
        norms["ours"].append(float(ours[1].clip_grad_norm_(0.5)))
        norms["theirs"].append(float(nn.utils.clip_grad_norm_(theirs[0].parameters(), 0.5)))
        for _, optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return {**finish(ours, theirs), "norms": norms}


def nonfinite(rank, policy="skip", hidden=False, accumulation=1):
    """A loss of rank 1 is not finite once, in the first micro-batch of its step."""
    model = ddp(Blocks())
    optimizer = staying(model, model if hidden else None, nonfinite=policy)
    seen = {"raised": [], "weights": []}
    for step in range(4):
        factor = float("nan") if step == 2 and rank == 1 else 1.0
        with model.no_sync():
            for part in range(1, accumulation):
                (loss_of(model, step + 1000 * part, rank) * factor).backward()
        (loss_of(model, step, rank) * (factor if accumulation == 1 else 1.0)).backward()
        try:
            optimizer.step()
        except orlop.NonFiniteError as error:
            seen["raised"].append((step, str(error)))
        optimizer.zero_grad()
        optimizer.synchronize()
        seen["weights"].append(weights(model.module))
    return {**seen, "skipped": optimizer.skipped_steps, "steps": optimizer.steps, "bad": optimizer.first_bad}


def checkpoint(rank, folder, hidden=False):
    """Five steps, saved by rank 0 alone, loaded by both into a new model, five more; and ten without a stop."""

    def run(model, optimizer, steps):
        for step in steps:
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    def make(seed):
        module = Blocks()
        torch.manual_seed(seed)
        for p in module.parameters():
            nn.init.normal_(p)
        model = ddp(module)
        return model, staying(model, model if hidden else None)

    straight, stopped, resumed = make(1), make(1), make(2)
    run(*straight, range(10))
    run(*stopped, range(5))
    path = folder / "saved.pt"
    if rank == 0:
        torch.save([stopped[0].module.state_dict(), stopped[1].state_dict()], path)
    dist.barrier()
    model_state, optimizer_state = torch.load(path)
    resumed[0].module.load_state_dict(model_state)
    resumed[1].load_state_dict(optimizer_state)
    run(*resumed, range(5, 10))
    return {
        "straight": weights(straight[0].module),
        "resumed": weights(resumed[0].module),
        "moments": [resumed[1].state_dict()["state"], straight[1].state_dict()["state"]],
    }


def experts(rank):
    """Expert 3 works on rank 0 only, expert 7 nowhere."""
    ours, theirs = both(Experts(), find_unused_parameters=True)
    for step in range(50):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(2 * step + rank))
        chosen = {3 if rank == 0 else 4, step % 3, 5 + (step + rank) % 2}
        for model, optimizer in (ours, theirs):
            (model(x, chosen) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**finish(ours, theirs), "start": weights(Experts())}


def generation(rank):
    """Between two steps the ranks generate 8 and 40 tokens and rank 0 alone reads what there is to read; `plain`
    does neither."""
    seen = {}
    for name in ("plain", "generating"):
        model = ddp(Blocks())
        optimizer = staying(model, model)
        for step in range(6):
            loss_of(model, step, rank).backward()
            if name == "generating" and rank == 0:
                assert optimizer.gradient(model.module.head.weight) is not None
            optimizer.step()
            optimizer.zero_grad()
            if name == "plain":
                continue
            ids = torch.tensor([[rank]])
            with torch.no_grad():
                for _ in range((8, 40)[rank]):
                    ids = torch.cat([ids, model.module(ids)[:, -1:].argmax(-1)], 1)
            seen["tokens"] = ids.numel() - 1
            if rank == 0:
                optimizer.state_dict()
                optimizer.placement()
                repr(optimizer)
                model.module.state_dict()
        optimizer.synchronize()
        seen[name] = weights(model.module)
    return seen


def mixed(rank):
    """Trained together; and by one process that is given the gradients of both."""
    model = ddp(Mixed())
    alone = Mixed()
    optimizer, single = staying(model), staying(alone)
    for step in range(10):
        model(torch.randn(3, 9, generator=torch.Generator().manual_seed(2 * step + rank))).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
    return {"start": weights(Mixed()), "together": weights(model.module), "alone": weights(alone)}


def trainer(rank, folder):
    """transformers' Trainer, which wraps the model in DDP itself: with orlop.hf, and with its own AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import orlop.hf

    def run(attaches):
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(64)]
        arguments = TrainingArguments(
            str(folder / f"trainer-{attaches}"), use_cpu=True, max_steps=8, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, logging_steps=1, save_steps=4, learning_rate=1e-3, max_grad_norm=0.5,
            report_to=[], disable_tqdm=True, seed=3,
        )  # fmt: skip
        each = Trainer(
            model=model, args=arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows]
        )
        if attaches:
            orlop.hf.attach(each, gradients="stay")
        each.train()
        return weights(model), [r["grad_norm"] for r in each.state.log_history if "grad_norm" in r]

    (ours, norms), (theirs, expected) = run(True), run(False)
    return {"ours": ours, "theirs": theirs, "norms": {"ours": norms, "theirs": expected}}


def refusals(rank, before):
    """What each way to gradients="leave" says among two ranks."""

    def wrap():
        module = Blocks()
        orlop.wrap(module, {"lr": 1e-3})

    def step_of_earlier():
        model, optimizer = before
        loss_of(ddp(model), 0, rank).backward()
        optimizer.step()

    ways = {
        "leave": lambda: orlop.AdamW(ddp(Blocks()).parameters(), gradients="leave"),
        "module": lambda: orlop.AdamW((m := ddp(Blocks())).parameters(), module=m),
        "wrap": wrap,
        "made before the ranks met": step_of_earlier,
    }
    seen = {}
    for name, way in ways.items():
        try:
            way()
            seen[name] = "nothing"
        except orlop.UsageError as error:
            seen[name] = str(error)
    return seen


def killed(rank, folder):
    """Rank 1 ends without a word in its sixth step, while an update may be under way. The other's next collective
    tells it; that its process then ends is for the caller to see."""
    model = ddp(Blocks())
    optimizer = staying(model, model)
    try:
        for step in range(100):
            loss = loss_of(model, step, rank)
            if step == 5 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        (folder / "told").write_text(f"{step} {error}")
        raise


def main(rank: int, folder: Path):
    torch.set_num_threads(1)
    module = Blocks()
    before = module, orlop.AdamW(module.parameters(), gradients="leave")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", f"file://{folder}/store", LIMIT, world_size=2, rank=rank)
    seen = {
        "plain": train(rank),
        "hidden": train(rank, hidden=True),
        "summed": train(rank, accumulation=3),
        "views": train(rank, gradient_as_bucket_view=True),
        "skip": nonfinite(rank),
        "skip, hidden": nonfinite(rank, hidden=True),
        "skip, summed": nonfinite(rank, accumulation=2),
        "raise": nonfinite(rank, "raise"),
        "checkpoint": checkpoint(rank, folder),
        "checkpoint, hidden": checkpoint(rank, folder, hidden=True),
        "experts": experts(rank),
        "generation": generation(rank),
        "mixed": mixed(rank),
        "refusals": refusals(rank, before),
        "trainer": trainer(rank, folder),
    }
    torch.save(seen, folder / f"rank-{rank}.pt")
    dist.barrier()
    (folder / f"killed-{rank}").write_text(str(time.time()))
    killed(rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
