# SPDX-License-Identifier: Apache-2.0
"""``trace``: a module's aten graph on fake tensors, its weights known by FQN."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from .declare import declared_placement
from .errors import SPError
from .graph import params


def trace(module: nn.Module, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """The aten graph that ``module(*args, **kwargs)`` runs, for inference.

    Nothing is computed and no memory is used for weights: a module built under
    ``torch.device("meta")`` traces as well as a real one. The graph takes the tensors of
    ``args`` and ``kwargs`` as inputs, in order, under the argument's name, and refers to
    parameters and buffers as get_attr nodes named by FQN, so that it runs with the module's
    own weights. In-place ops are functionalised; control flow is followed as taken.

    Args:
        module: the model, or a part of it.
        args, kwargs: example inputs; sizes are taken as they are.

    Returns:
        A GraphModule with ``meta["val"]`` on every node.

    Raises:
        SPError: the module cannot be traced; the message holds the cause.
    """
    if not isinstance(module, nn.Module):
        raise SPError(f"trace needs an nn.Module, found {type(module).__name__}")
    mode = _mode_of((args, kwargs))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        fakes = {name: _fake(mode, t) for name, t in tensors.items()}
        inputs, rebuild = _flatten(module, args, kwargs, mode)

        def call(weights: dict[str, torch.Tensor], *flat: Any) -> Any:
            with torch.nn.utils.stateless._reparametrize_module(module, weights, tie_weights=True):
                a, k = rebuild(flat)
                return module(*a, **k)

        stack.enter_context(mode)  # ops without a tensor input (factories, receives) are faked too
        try:
            gm = make_fx(
                torch.func.functionalize(call, remove="mutations"),
                pre_dispatch=False,
                record_stack_traces=True,
            )(fakes, *inputs.values())
        except SPError:
            raise
        except Exception as err:
            raise SPError(f"tracing {type(module).__name__} failed: {err}") from err
    _attach(gm, module, list(tensors), list(inputs))
    return gm


def _mode_of(tree: Any) -> FakeTensorMode:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake


def _flatten(
    module: nn.Module, args: Any, kwargs: Any, mode: FakeTensorMode
) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Fake tensors of the arguments by name, and a function that puts them back."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    names = _leaf_names(module, args, kwargs)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = {names[i]: _fake(mode, leaves[i]) for i in at}

    def rebuild(flat: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(at, flat, strict=True):
            filled[i] = value
        return pytree.tree_unflatten(filled, spec)

    return inputs, rebuild


def _leaf_names(module: nn.Module, args: Any, kwargs: Any) -> list[str]:
    """A valid, unique name for every leaf: the argument's, with a path for nested ones."""
    import inspect

    taken = inspect.signature(module.forward).parameters
    positional = [
        name for name, p in taken.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    heads = [*positional, *(f"arg{i}" for i in range(len(positional), len(args)))]
    names: list[str] = []
    for head, tree in [*zip(heads, args, strict=False), *kwargs.items()]:
        for path, _ in pytree.tree_flatten_with_path(tree)[0]:
            tail = "".join(f"_{getattr(k, 'key', getattr(k, 'idx', ''))}" for k in path)
            name = f"{head}{tail}"
            while name in names:
                name += "_"
            names.append(name)
    return names


def _attach(gm: fx.GraphModule, module: nn.Module, weights: list[str], inputs: list[str]) -> None:
    """Turn weight placeholders into get_attr nodes on ``module``'s own parameters."""
    graph = gm.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, weights, strict=False):
        tensor = _lookup(module, name)
        if not node.users:
            graph.erase_node(node)
            continue
        with graph.inserting_before(node):
            new = graph.create_node("get_attr", name)
        new.meta.update(node.meta)
        params.mark(new, name, declared_placement(tensor))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        _install(gm, name, tensor)
    first = next(iter(graph.nodes))
    old = placeholders[len(weights) :]
    for node, name in zip(old, inputs, strict=True):
        with graph.inserting_before(first):
            new = graph.placeholder(name)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
    for node in old:
        graph.erase_node(node)
    _plain_signature(graph)
    graph.lint()
    gm.recompile()


def _plain_signature(graph: fx.Graph) -> None:
    """Call the graph with its tensors and get the module's own output structure back."""
    spec = graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    output = graph.find_nodes(op="output")[0]
    output.args = (pytree.tree_unflatten(output.args[0], spec),)
    graph.set_codegen(fx.graph.CodeGen())


def _lookup(module: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def _install(gm: fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Hang ``tensor`` itself under the same FQN, so that the storage stays shared."""
    owner: nn.Module = gm
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor)
