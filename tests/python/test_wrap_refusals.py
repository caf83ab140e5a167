"""What orlop.wrap refuses, by name, and what it leaves as it was."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from wrap_model import Model, batch, plain, streamed, train, weights  # noqa: E402

import orlop  # noqa: E402


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"config": {"limits": {"gpu": 100}}}, orlop.DoesNotFitError, "two blocks"),
        ({"config": {"limits": {"cpu": 1}}}, orlop.UsageError, "cpu"),
        ({"config": {"limits": {"gpu": "lots"}}}, orlop.UsageError, "limits.gpu: 'lots' is not a number"),
        ({"config": {"limits": {"gpu": -5}}}, orlop.UsageError, "limits.gpu: '?-5'? is not a number"),
        ({"config": {"limits": 3}}, orlop.UsageError, "limits = 3 is no mapping"),
        ({"config": {"zero_optimization": {}}}, orlop.UsageError, "deepspeed_compat"),
        ({"config": 7}, orlop.UsageError, "config"),
        ({"blocks": [torch.nn.Linear(1, 1)]}, orlop.UsageError, "no part"),
        ({"optimizer": 3}, orlop.UsageError, "int"),
        ({"optimizer": {"amsgrad": True}}, orlop.UsageError, "amsgrad"),
    ],
)
def test_mistakes_are_named(arguments, error, text):
    """After a refusal the model is the plain one, which trains as if nothing had been asked."""
    model = Model()
    with pytest.raises(error, match=text):
        orlop.wrap(model, **arguments)
    expected, before = Model(), Model()
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    assert not any(vars(p) for p in model.parameters())
    for m in (model, expected):
        optimizer = orlop.AdamW(m.parameters(), lr=1e-2)
        train(m, optimizer, 2)
    for p, q, r in zip(model.parameters(), expected.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q) and not torch.equal(p, r)
    orlop.wrap(model)


def test_wrapped_twice_and_unwrapped():
    model, optimizer = streamed(Model())
    train(model, optimizer, 2)
    expected = weights(model)
    with pytest.raises(orlop.UsageError, match="wrapped already"):
        orlop.wrap(model)
    optimizer.close()
    assert orlop.unwrap(model) is model
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    with pytest.raises(orlop.UsageError, match="not wrapped"):
        orlop.unwrap(model)
    again, optimizer = streamed(model)
    train(again, optimizer, 1)


def test_blocks_that_another_model_manages_are_refused():
    """A part of a wrapped model, and a model around one: both would move the same weights."""
    around = torch.nn.Sequential(Model())
    model, optimizer = streamed(around[0])
    with pytest.raises(
        orlop.UsageError, match=r"0\.blocks\.0\.weight is in a block of another wrapped model"
    ):
        orlop.wrap(around, {"lr": 1e-2})
    with pytest.raises(orlop.UsageError, match="block of another wrapped model"):
        orlop.wrap(model.blocks[1], {"lr": 1e-2})
    expected = plain(Model())
    assert train(model, optimizer, 3) == train(*expected, 3)


def test_an_optimizer_beside_that_of_the_wrap_is_refused():
    """It would write to memory that is not there."""
    model, _ = orlop.wrap(Model())
    with pytest.raises(orlop.UsageError, match=r"orlop\.wrap makes"):
        orlop.AdamW(model.parameters(), lr=1e-2)
    optimizer = orlop.AdamW([*model.inp.parameters(), *model.out.parameters()], lr=1e-2)
    for block in model.blocks:
        block.requires_grad_(False)
    before = weights(model)
    train(model, optimizer, 2)
    after = weights(model)
    assert all(torch.equal(before[n], after[n]) == n.startswith("blocks") for n in before)


def test_a_step_of_another_optimizer_says_whose_it_is():
    """As a Trainer makes one that was given none. No block has changed: the step can still be taken."""
    model, optimizer = streamed(Model())
    expected = plain(Model())
    losses = train(*expected, 3)
    model(batch(0)).float().square().mean().backward()
    with pytest.raises(orlop.UsageError, match=r"blocks\.0\.weight: .* optimizers=\(optimizer, None\)"):
        torch.optim.AdamW(model.blocks.parameters(), lr=1.0).step()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert train(model, optimizer, 2, first=1) == losses[1:]


def test_a_model_is_not_unwrapped_under_its_optimizer():
    """The optimizer would go on to train weights that the model no longer has."""
    model, optimizer = streamed(Model())
    expected = plain(Model())
    losses = train(model, optimizer, 2)
    with pytest.raises(orlop.UsageError, match=r"optimizer\.close\(\)"):
        orlop.unwrap(model)
    assert losses + train(model, optimizer, 2, first=2) == train(*expected, 4)
    optimizer.close()
    orlop.unwrap(model)
