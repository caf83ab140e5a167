"""orlop.AdamW keeps what torch.optim.Optimizer promises, and refuses by name what it cannot do."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from adamw_pair import GRADIENTS, backward, pair  # noqa: E402

import orlop  # noqa: E402

# --- B-02: an Optimizer ---------------------------------------------------------------------------


def test_learning_rate_of_the_moment_is_used():
    """Case B-02: lr edited in param_groups, 1e-3 -> 0 -> 1e-4, is that of the next step, by value."""
    (ours, optimizer), (theirs, reference) = pair()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 1e-3
    for step, lr in enumerate((1e-3, 0.0, 1e-4)):
        before = ours.detach().clone()
        for p, o in ((ours, optimizer), (theirs, reference)):
            o.param_groups[0]["lr"] = lr
            backward(p, step)
            o.step()
            o.zero_grad()
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert torch.equal(before, ours) == (lr == 0.0)


SCHEDULERS = pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.3, 0.0, total_iters=8),
    ],
    ids=["lambda", "onecycle", "plateau", "restarts", "exponential", "linear"],
)


def scheduled(p, optimizer, scheduler, steps):
    for step in range(steps):
        backward(p, step)
        optimizer.step()
        optimizer.zero_grad()
        metrics = (1.0,) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
        scheduler.step(*metrics)


@SCHEDULERS
def test_schedulers(make):
    """Case B-02: torch's schedulers accept it and their rates and momenta count."""
    (ours, optimizer), (theirs, reference) = pair()
    for p, o in ((ours, optimizer), (theirs, reference)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduled(p, o, make(o), 10)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_learning_rate_below_zero_by_rounding():
    """At a step, with a scheduler and without, and when such a run goes on; more than that is refused."""
    (ours, optimizer), (theirs, reference) = pair()
    for p, o in ((ours, optimizer), (theirs, reference)):
        scheduler = torch.optim.lr_scheduler.LinearLR(o, 0.3, 0.0, total_iters=20)
        scheduled(p, o, scheduler, 24)
        assert -1e-17 < o.param_groups[0]["lr"] < 0
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0].pop("initial_lr")
    before = ours.detach().clone()
    backward(ours)
    optimizer.step()
    assert torch.equal(ours, before)
    for lr in (-2e-15, -1e-3, float("nan"), float("inf")):
        optimizer.param_groups[0]["lr"] = lr
        with pytest.raises(ValueError, match="learning rate"):
            optimizer.step()
    with pytest.raises(ValueError, match="learning rate"):
        orlop.AdamW([ours], lr=-1e-18)


@SCHEDULERS
def test_a_scheduler_over_the_optimizer_that_was_taken_over(make):
    """It drives the one in its place, also after that has loaded a state."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2)]
    ours, theirs = (torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1) for p in params)
    schedulers = make(ours), make(theirs)
    optimizers = orlop.AdamW.from_torch(ours), theirs
    for _ in range(2):
        for p, optimizer, scheduler in zip(params, optimizers, schedulers, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduled(p, optimizer, scheduler, 5)
            optimizer.load_state_dict(optimizer.state_dict())
            scheduler.load_state_dict(scheduler.state_dict())
            assert optimizer.param_groups[0]["lr"] == scheduler.optimizer.param_groups[0]["lr"]
    torch.testing.assert_close(*params, atol=1e-6, rtol=1e-5)


def test_warm_up_of_transformers():
    """Case B-02: the polynomial schedule reads defaults["lr"]."""
    transformers = pytest.importorskip("transformers")
    (p, optimizer), _ = pair()
    scheduler = transformers.get_polynomial_decay_schedule_with_warmup(optimizer, 2, 10, lr_end=1e-7)
    backward(p)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_learning_rate_as_tensor():
    (ours, optimizer), (theirs, reference) = pair(lr=torch.tensor(1e-2))
    for p, o in ((ours, optimizer), (theirs, reference)):
        backward(p)
        o.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@GRADIENTS
def test_closure_and_hooks(gradients):
    (p, optimizer), _ = pair(gradients=gradients)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    assert float(optimizer.step(closure).detach()) == pytest.approx(float((before**2).sum()))
    assert calls == ["pre", "closure", "post"]
    assert not torch.equal(before, p)


@GRADIENTS
def test_zero_grad(gradients):
    """Case B-02: set_to_none and zeros, from the optimizer and from the module."""
    for set_to_none in (True, False):
        (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
        module = torch.nn.Module()
        module.p = ours
        for p, o in ((ours, optimizer), (theirs, reference)):
            for step in range(3):
                backward(p, step)
                o.step()
                o.zero_grad(set_to_none=set_to_none)
            o.step()  # zeros move the moments, None does not
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        backward(ours, 7)
        module.zero_grad(set_to_none=set_to_none)
        before = optimizer.state[ours]["exp_avg"].clone()
        optimizer.step()
        assert torch.equal(before, optimizer.state[ours]["exp_avg"]) == set_to_none


@GRADIENTS
def test_gradients_stay_until_they_are_dropped(gradients):
    """As in torch: two steps on one gradient, and a backward that adds to it."""
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
    for p, o in ((ours, optimizer), (theirs, reference)):
        backward(p, 1)
        o.step()
        o.step()
        backward(p, 2)
        o.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@GRADIENTS
def test_add_param_group(gradients):
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
    more = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))]
    for p, q, o in ((ours, more[0], optimizer), (theirs, more[1], reference)):
        for step in range(6):
            if step == 2:
                o.add_param_group({"params": [q], "lr": 0.1})
            backward(p, step)
            backward(q, step)
            o.step()
            o.zero_grad()
            if step < 2:
                q.grad = None
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(more[0], more[1], atol=1e-6, rtol=1e-5)
    with pytest.raises(TypeError, match="float64"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 2


def test_groups_keep_number_and_order():
    """Case B-06: an empty group and a frozen one are seen by a scheduler where they were given."""
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = orlop.AdamW(
        [{"params": [], "lr": 1.0}, {"params": [frozen], "lr": 2.0}, {"params": [p], "lr": 3.0}]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert scheduler.get_last_lr() == [1.0, 2.0, 3.0]
    backward(p)
    optimizer.step()
    assert torch.equal(frozen, torch.ones(3))


# --- B-01, B-03, N-13, N-15, N-16, U-12: refusals -------------------------------------------------


@pytest.mark.parametrize("option", ["amsgrad", "foreach", "fused", "capturable", "differentiable"])
def test_options_are_refused_by_name(option):
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(orlop.UsageError, match=option):
        orlop.AdamW([p], **{option: True})
    optimizer = orlop.AdamW([p])
    optimizer.param_groups[0][option] = True
    backward(p)
    with pytest.raises(orlop.UsageError, match=option):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"lr": float("nan")}, "learning rate"),
        ({"betas": (1.0, 0.9)}, "index 0"),
        ({"betas": (0.9, -0.1)}, "index 1"),
        ({"eps": -1e-8}, "epsilon"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_hyperparameters_out_of_range(options, text):
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=text):
        orlop.AdamW([p], **options)
    optimizer = orlop.AdamW([p])
    optimizer.param_groups[0].update(options)
    backward(p)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert torch.equal(before, p)


@pytest.mark.parametrize(
    ("parameter", "error", "text"),
    [
        (lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.float64)), TypeError, "float64"),
        (lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)), TypeError, "complex64"),
        (lambda: torch.nn.Parameter(torch.ones(3, device="meta")), orlop.UsageError, "meta"),
        (lambda: torch.nn.Parameter(torch.ones(2, 6)[:, ::2]), orlop.UsageError, "contiguous"),
        (lambda: torch.nn.Parameter(torch.ones(1).expand(4)), orlop.UsageError, "contiguous"),
    ],
    ids=["float64", "complex", "meta", "gaps", "expanded"],
)
def test_parameters_are_refused_by_name(parameter, error, text):
    """Cases B-01, B-03: an exception that names the parameter, never a fault."""
    named = [("fine", torch.nn.Parameter(torch.ones(2))), ("layer.bad", parameter())]
    with pytest.raises(error, match=text) as raised:
        orlop.AdamW([p for _, p in named])
    assert "parameter 1 of group 0" in str(raised.value)
    holder = torch.nn.Module()
    holder.layer = torch.nn.Module()
    holder.layer.register_parameter("bad", named[1][1])
    with pytest.raises(error, match=r"layer\.bad"):
        orlop.AdamW([named[1][1]], module=holder)


def test_lazy_modules_are_refused_until_they_have_shapes():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    for make in (
        lambda: orlop.AdamW(model.parameters()),
        lambda: orlop.AdamW(model.parameters(), module=model),
        lambda: orlop.wrap(model, {"lr": 1e-3}),
    ):
        with pytest.raises(
            orlop.UsageError, match=r"(parameter 0 of group 0|0\.weight) is of a lazy module.*forward"
        ):
            make()
    model(torch.ones(1, 4))
    orlop.AdamW(model.parameters(), module=model)


def test_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = orlop.AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_sharing_memory_is_refused():
    """Case N-16: duplicates as in torch; two parameters over one storage would step twice."""
    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="more than one parameter group"):
        orlop.AdamW([{"params": [p]}, {"params": [p]}])
    with pytest.raises(orlop.UsageError, match="share memory"):
        orlop.AdamW([p, torch.nn.Parameter(p.detach()[2:])])


def test_tied_weight_steps_once():
    """Case N-16: one module parameter in two places."""
    results = []
    for optimizer_class in (orlop.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        embedding, head = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False)
        head.weight = embedding.weight
        model = torch.nn.ModuleList([embedding, head])
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        for step in range(20):
            ids = torch.tensor([step % 7, (step * 3) % 7])
            torch.nn.functional.cross_entropy(head(embedding(ids)), (ids + 1) % 7).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(embedding.weight.detach())
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


def test_other_wrapper_is_refused():
    """Case U-12: a parameter that DeepSpeed manages."""
    p = torch.nn.Parameter(torch.ones(4))
    p.ds_id = 3
    with pytest.raises(orlop.UsageError, match="DeepSpeed"):
        orlop.AdamW([p])


def test_closed_optimizer():
    """Case B-01: a call after close() is an exception."""
    (p, optimizer), _ = pair()
    backward(p)
    optimizer.step()
    optimizer.close()
    backward(p)
    with pytest.raises(orlop.UsageError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize(
    "action", [copy.deepcopy, lambda o: __import__("pickle").dumps(o)], ids=["deepcopy", "pickle"]
)
def test_copies_are_refused(action):
    (_, optimizer), _ = pair()
    with pytest.raises(orlop.UsageError, match="state_dict"):
        action(optimizer)
