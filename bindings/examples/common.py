"""What every example trains: a small random Llama-like model on counting sequences."""

import torch


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        mixed = torch.cumsum(x, dim=1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(mixed))))


class Model(torch.nn.Module):
    def __init__(self, vocab=64, width=32, blocks=3):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    torch.manual_seed(0)
    return Model().to("cuda" if torch.cuda.is_available() else "cpu")


def batches(count, device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        start = torch.randint(0, 64, (4, 1), generator=generator)
        ids = (start + torch.arange(17)) % 64
        yield ids[:, :-1].to(device), ids[:, 1:].to(device)
