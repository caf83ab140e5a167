"""The loop of plain_loop.py with the weights of its blocks in host memory: two lines new."""

import torch
from common import batches, build_model

import orlop

model = build_model()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
model, opt = orlop.wrap(model, opt)
sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 30)
for x, y in batches(30, next(model.parameters()).device):
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    opt.step()
    sched.step()
    opt.zero_grad()
    print(f"{loss.item():.4f}")
