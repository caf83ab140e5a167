"""Importing Orlop asks no version of PyTorch for more than its public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import orlop

PACKAGE = Path(orlop.__file__).parent
DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def run_at_import(node: ast.AST):
    """The nodes below that run when the module is imported: not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFERRED):
            at_import = [*getattr(child, "decorator_list", []), *child.args.defaults, *child.args.kw_defaults]
            for part in filter(None, at_import):
                yield part
                yield from run_at_import(part)
        else:
            yield child
            yield from run_at_import(child)


def dotted(node: ast.AST) -> list[str]:
    """The names of `torch.a.b`; none for anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_at_import(source: str) -> list[str]:
    found = set()
    for node in run_at_import(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [[*node.module.split("."), alias.name] for alias in node.names]
        # torch._C is as old as torch; what is in it is not.
        found |= {
            ".".join(name)
            for name in names
            if name and name[0] == "torch" and any(map(is_private, name[1:])) and name != ["torch", "_C"]
        }
    return sorted(found)


def test_no_private_name_is_needed_at_import():
    """Case I-08. With getattr and a default, or in a function, it is: whoever asks for that mode is told."""
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 40
    found = {
        str(path): names for path in sources if (names := private_names_at_import(path.read_text("utf-8")))
    }
    assert not found


def test_planted_names_are_found():
    planted = """
import torch
from torch.distributed import _functional_collectives
from torch.nn import Linear
TABLE = {torch._foreach_norm: 1, torch.norm: 2, "late": lambda: torch._foreach_mul_}
class Tensor(torch.Tensor):
    hook = torch._C._current_graph_task_id
    def later(self, mode=torch._private_mode):
        return torch._amp_update_scale_
version, count = torch.__version__, getattr(torch._C, "_use_count", None)
"""
    assert private_names_at_import(planted) == [
        "torch._C._current_graph_task_id",
        "torch._foreach_norm",
        "torch._private_mode",
        "torch.distributed._functional_collectives",
    ]


@pytest.mark.parametrize("grouped", [False, True])
def test_named_parameters_where_pytorch_does_not_know_them(monkeypatch, grouped):
    """Case I-08: it does from 2.6 on."""
    torch = pytest.importorskip("torch")
    from orlop import older_torch

    monkeypatch.setattr(older_torch, "TORCH_VERSION", (2, 5))
    model = torch.nn.Linear(4, 4)
    named = list(model.named_parameters())
    groups = [{"params": iter([one]), "lr": 0.1} for one in named] if grouped else iter(named)
    optimizer = orlop.AdamW(groups)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert names == ["weight", "bias"]
    assert [p for group in optimizer.param_groups for p in group["params"]] == [p for _, p in named]
    plain = orlop.AdamW(torch.nn.Linear(4, 4).parameters())
    assert "param_names" not in plain.param_groups[0]
