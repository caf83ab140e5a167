"""orlop.wrap at the edges: shared storage."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from test_wrap import Model, batch, weights  # noqa: E402


# --- shared storage -----------------------------------------------------------------------------


def share_whole(model):
    model.blocks[3].weight.data = model.blocks[1].weight.data
    return "blocks.1.weight", "blocks.3.weight"


def share_slice(model):
    both = torch.randn(24, 24)
    model.blocks[0].weight.data, model.blocks[4].bias.data = both, both[5]
    return "blocks.0.weight", "blocks.4.bias"


def share_with_head(model):
    model.out.weight.data = model.blocks[2].weight.data[:4]
    return "blocks.2.weight", "out.weight"


@pytest.mark.parametrize("optimizer", [{"lr": 1e-2}, None], ids=["trained", "evaluated"])
@pytest.mark.parametrize("share", [share_whole, share_slice, share_with_head])
def test_two_parameters_over_one_storage_are_refused(share, optimizer):
    """Cases N-16, C-02: as two copies they would be untied without a word; the model stays as it was."""
    model = Model()
    one, other = share(model)
    before = weights(model)
    kinds = [type(p) for p in model.parameters()]
    with pytest.raises(orlop.UsageError, match=rf"({one} and {other}|{other} and {one}) share memory"):
        orlop.wrap(model, optimizer)
    assert [type(p) for p in model.parameters()] == kinds
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model(batch(0)).sum().backward()
