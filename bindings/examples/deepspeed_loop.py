"""A training loop written for DeepSpeed; deepspeed_door.py is the same loop on Orlop."""

import deepspeed
import torch
from common import batches, build_model

model = build_model()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
engine, _, _, _ = deepspeed.initialize(model=model, config=config)
sched = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 1.0, 0.1, 30)
for x, y in batches(30, next(model.parameters()).device):
    loss = torch.nn.functional.cross_entropy(engine(x).flatten(0, 1), y.flatten())
    engine.backward(loss)
    engine.step()
    sched.step()
    print(f"{loss.item():.4f}")
