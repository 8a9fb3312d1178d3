"""One window of a gradient that funcga made, at the cost of the hand-written loop.

`Window.fold` is all that a warm micro-batch runs: the loss forwards, and backwards into the sums.
For each parameter among the arguments there is a leaf, `p.detach().requires_grad_()`, which shares
its memory; the leaves of a module's own gradients are its parameters. The sums stand as `.grad`s of
the leaves, autograd adds to them in place, and the weight of a micro-batch is its cotangent.

Where a gradient cannot be added so (folds that are no sums, hooks of the user's beside uneven
weights, sums wider than a module's own parameters) each gradient is taken from `.grad` after its
pass, and folded in.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments, argument_names
from funcga._grad import GradientFunction, evaluations, scaled_loss
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.engine import graphs
from torch_backend.engine.guards import EVERY, ON, functions, recompute
from torch_backend.engine.guards.aside import gradients_aside
from torch_backend.engine.guards.unchanged import (
    check_held,
    ran_backward,
    versions_of,
    writes_of,
    written,
)
from torch_backend.engine.guards.watched import grads_watched
from torch_backend.engine.plan import OWN, Graph, Plan, plan_of
from torch_backend.engine.sums import Folding, Sums
from torch_backend.gradients import is_constant, put_hooks, switched_off
from torch_backend.modules import PureLoss
from torch_backend.modules.checks import check_unfrozen
from torch_backend.modules.layers import Walk, call_loss

_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_NOTHING = nullcontext()


class Window:
    """One window: a context. `fold` each micro-batch, then take the `result`.

    `trees`: the differentiated arguments as the loss is given them, by index; `inputs`: their
    leaves, which last as long as the window; `originals`: what they are made of. All three are set
    on entering, and stay. `sums`: set by the first micro-batch.
    """

    sums: Sums | None = None

    def __init__(
        self,
        program: Program,
        gradient: GradientFunction,
        backend: Backend,
        arguments: Arguments,
        plan: Plan | None,
    ):
        self.program, self.gradient, self.backend = program, gradient, backend
        self.arguments, self.known = arguments, plan
        self.args = tuple([part.value for part in arguments.parts])
        # Those of a module's own parameters: set by who makes the window.
        self.module: nn.Module | None = None
        self.walk: Walk | None = None
        self.stack = ExitStack()
        self.unreached = False  # set by `_look`: whether a loss reached no leaf
        self.begun = False  # set by `_adopt`: whether every sum has its accumulator

    # --- a micro-batch

    def fold(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: float) -> None:
        """Folds one micro-batch in: the loss forwards, and backwards into the sums."""
        plan, gradient, inputs, scale = self.plan, self.gradient, self.inputs, None
        moving: list[torch.Tensor] = []
        if plan.moving:
            args, moving = self._with_leaves_of(args)
        if kwargs or gradient.scaled:
            scale, kwargs = gradient.read_scale(kwargs, self.backend)
        is_first, nodes = not gradient.reached, graphs.nodes_made()
        count = evaluations() if is_first else 0
        with recording_loss(), self.visit as loss_fn:
            with self.noted:
                loss, aux = loss_fn(*args[self.first :], **kwargs), None
            is_usual = type(loss) is torch.Tensor and not loss.ndim and loss.dtype.is_floating_point
            if gradient.has_aux or not is_usual:
                loss, aux = gradient.split(loss, self.backend)
            nodes = graphs.nodes_made() - nodes
            if self.sums is None:
                self._bind(loss, aux, moving)
            sums, folding = self.sums, self.sums.folding
            # Nothing was added since the last pass, unless loss_fn itself has called .backward().
            if ON and writes_of((*inputs, *moving)) != self.writes:
                check_held(inputs, self.held)
                raise ran_backward()
            share = sums.share(weight)
            if share or moving or not folding.are_weighted:  # of weight 0 nothing is added
                objective = loss if scale is None else scaled_loss(loss, scale, arrays)
                if is_first:
                    self._note_reached(objective, moving, weight, evaluations() == count)
                if objective.requires_grad and (inputs or moving):
                    self._backward(objective, nodes, weight, share, moving)
                elif not folding.lends:
                    self._take(weight)
        if folding.loss_alone is not None and loss.dtype is self.loss_dtype:
            sums.add_loss(loss.detach(), folding.loss_alone, weight, share)
        else:
            sums.add(self._rest(loss, aux, moving), weight)

    def _backward(
        self, loss: torch.Tensor, nodes: int, weight: float, share: float, moving: list[torch.Tensor]
    ) -> None:
        """Runs the backward pass of a loss, and folds its gradients in."""
        plan, inputs, sums, folding = self.plan, self.inputs, self.sums, self.sums.folding
        graph = plan.graphs.get(nodes)
        if graph is None or EVERY:
            graph = self._look(loss, moving)
        seed = share if folding.are_weighted else 1.0
        is_lent = folding.lends and (not folding.weighs or share == 1 or (
            folding.are_weighted and plan.takes_weights and holds(loss.dtype, seed)
        ))
        if not is_lent:
            seed = 1.0
            for leaf in inputs:
                leaf.grad = None
        before = 0 if not is_lent else self.writes
        cotangent = torch.full_like(loss, seed, requires_grad=False)
        leaves, on_host = (*inputs, *moving), plan.on_host and loss.is_cpu
        try:
            with self.outside:
                if graph.custom:
                    functions.run_unrestricted(
                        loss, cotangent, leaves, on_host, self.seen, self.originals, self.gradient
                    )
                else:
                    with recompute.watched(loss, self.seen, leaves, on_host, False):
                        plan.run(loss, cotangent, leaves, on_host)
        except RuntimeError as error:
            if all(map(_REQUIRES_GRAD, leaves)):
                raise
            raise switched_off() from error
        self.writes = writes_of(leaves)
        arrivals = self.writes - before
        if graph.arrivals != arrivals and not graph.custom:
            # Either nobody has counted, or this is another graph of equally many nodes.
            if graph.arrivals is not None and graphs.reach(loss, {*map(id, leaves)}).custom:
                raise changed()
            graph = Graph(False, arrivals)
        plan.graphs.put(nodes, graph)
        if not is_lent:
            self._take(weight)
        elif not self.begun:
            self._adopt()
        self.writes = writes_of(inputs)

    def _take(self, weight: float) -> None:
        """Folds the gradients in that a pass has left in the leaves, and frees them."""
        sums, grads, folding = self.sums, self.sums.folding.grads, self.sums.folding
        values = {
            index: torch.zeros_like(leaf, requires_grad=False) if leaf.grad is None else leaf.grad
            for index, leaf in zip(grads, self.inputs, strict=True)
        }
        for leaf in self.inputs:
            leaf.grad = None
        sums.fold(values, weight)
        for index in sums.collected.keys() & values.keys() | {*folding.outputs.threads} & values.keys():
            self.passed[index] = values[index]
        if folding.lends:
            self.held = [sums.of[index] for index in grads]
            for leaf, total in zip(self.inputs, self.held, strict=True):
                if leaf.grad is not total:
                    self._hold(leaf, total)
            self.begun = True

    def _adopt(self) -> None:
        """Makes sums of the first gradients that autograd has left in the leaves."""
        grads, sums = [*map(_GRAD, self.inputs)], self.sums
        new = [at for at, grad in enumerate(grads) if grad is not None and self.held[at] is None]
        firsts = [arrays.strided(grads[at]) for at in new]
        # Later gradients are added in place, so nobody else may hold this memory.
        for at, first, alone in zip(new, firsts, are_alone(firsts), strict=True):
            total = first if alone else first.clone()
            if total is not grads[at]:
                self.inputs[at].grad = total
            self.held[at] = sums.of[sums.folding.grads[at]] = total
        self.begun = all(total is not None for total in self.held)

    def _rest(self, loss: torch.Tensor, aux: Tree, moving: list[torch.Tensor]) -> dict[int, Any]:
        """What stands beside the gradients that autograd adds, by leaf."""
        folding, gradient = self.sums.folding, self.gradient
        value = gradient.compose(loss.detach(), detached(aux, True), [() for _ in self.plan.indices])
        assert folding.rest_outputs is not None
        rest = folding.rest_outputs.leaves(value, f"micro-batch {self.sums.steps + 1}")
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in moving]
        passed, self.passed = self.passed, {}
        values = dict(zip(folding.beside, rest, strict=True))
        return values | dict(zip(folding.moved, map(torch.Tensor.detach, grads), strict=True)) | passed

    # --- what a window begins with

    def __enter__(self) -> "Window":
        with ExitStack() as stack:
            self.stack = stack
            if torch.is_inference_mode_enabled():
                # No tensor that is made in it can ever have a gradient.
                stack.enter_context(torch.inference_mode(False))
            if not torch.is_grad_enabled():
                stack.enter_context(torch.enable_grad())
            self._make_leaves()
            plan = self.plan
            self.first, self.loss_fn = 0, self.gradient.loss_fn
            self.visit: AbstractContextManager[Callable[..., Any]] = nullcontext(self.loss_fn)
            if self.module is not None:
                self.visit = nullcontext(partial(call_loss, self.loss_fn, self.module))
                assert self.walk is not None
                stack.enter_context(gradients_aside(self.inputs, self.walk.ids(self.module)))
            elif ON:
                watched = [t for t in self.originals if isinstance(t, torch.Tensor) and t.requires_grad]
                if watched:
                    stack.enter_context(grads_watched(watched))
            self._enter_module(stack)
            unwritten = self.inputs
            if plan.shortens_rows:
                unwritten = [p for p in unwritten if id(p) not in plan.shortens_rows]
            self.unwritten, self.versions = unwritten, versions_of(unwritten)
            self.outside: AbstractContextManager[object] = _NOTHING
            if plan.autocast:
                stack.callback(torch.clear_autocast_cache)
                self.outside = outside_of_autocast({leaf.device.type for leaf in self.inputs})
            self.noted: AbstractContextManager[object] = _NOTHING
            if plan.noted and (self.known is None or EVERY):
                self.noted = Again(partial(recompute.noted, plan.seen, self.inputs))
            self.seen = plan.seen if plan.noted else None
            self.held: list[Any] = []  # the sum that stands as the `.grad` of each of the inputs
            self.micro: dict[int, Tree] = {}  # the differentiated arguments of a micro-batch alone
            self.passed: dict[int, Any] = {}
            self.writes = 0
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def _make_leaves(self) -> None:
        gradient, plan = self.gradient, self.known
        self.trees: dict[int, Tree] = {}
        self.inputs: list[torch.Tensor] = []
        self.originals: list[Any] = []
        hooked = False
        if self.module is not None:
            assert self.walk is not None
            own = self.walk.trainable(self.module)
            self.trees[OWN], self.inputs, self.originals = own, [*own.values()], [*own.values()]
            indices: tuple[int, ...] = (OWN,)
            hooked = put_hooks(self.inputs, self.inputs, lambda: self.paths(own, OWN))
        else:
            indices = gradient.arg_indices(len(self.args)) if plan is None else plan.indices
        splits = lambda index: bool(self.arguments.parts[index].axes)
        for index in indices if self.module is None else ():
            if plan is None:
                originals = trees.flatten(self.args[index])[0]
                check_unfrozen(originals, self.args[index], gradient, index)
            if not splits(index):
                tree, leaves, originals = self._leaves_of(self.args[index], index)
                hooked = (plan is None or plan.hooked) and self._put_hooks(
                    originals, leaves, tree, index
                ) or hooked
                self.trees[index] = tree
                self.inputs += leaves
                self.originals += originals
        self.plan = plan or plan_of(gradient, indices, splits, self.inputs, hooked, self.module)

    def _put_hooks(self, originals: list[Any], leaves: list[Any], tree: Tree, index: int) -> bool:
        return put_hooks(originals, leaves, lambda: self.paths(tree, index))

    def _leaves_of(self, tree: Tree, index: int) -> tuple[Tree, list[torch.Tensor], list[Any]]:
        """(the tree of the leaves of an argument, the leaves, what they are made of)."""
        originals, structure = trees.flatten(tree)
        try:
            leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in originals]
        except (RuntimeError, AttributeError, ValueError):
            # Numbers, integers, or tensors that were made in inference mode. The check says which
            # cannot be differentiated at all; the others are copied.
            self.gradient.check_leaves(tree, index, self.backend)
            copies = [leaf if leaf is None else torch.as_tensor(leaf).detach().clone() for leaf in originals]
            leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in copies]
        pairs = [(leaf, o) for leaf, o in zip(leaves, originals, strict=True) if leaf is not None]
        return trees.unflatten(structure, leaves), [leaf for leaf, _ in pairs], [o for _, o in pairs]

    def _with_leaves_of(self, args: tuple[Tree, ...]) -> tuple[tuple[Tree, ...], list[torch.Tensor]]:
        """The arguments of a micro-batch with leaves of those that it alone has, and these."""
        made = {index: self._leaves_of(args[index], index) for index in self.plan.moving}
        for index, (tree, leaves, originals) in made.items():
            self._put_hooks(originals, leaves, tree, index)
        self.micro = {index: tree for index, (tree, *_) in made.items()}
        args = tuple([self.micro.get(index, arg) for index, arg in enumerate(args)])
        return args, [leaf for _, leaves, _ in made.values() for leaf in leaves]

    def _enter_module(self, stack: ExitStack) -> None:
        """Lets a pure_loss be called in its module, which has the parameters meanwhile: it is
        given none. Where no code of the user's runs between two micro-batches, one visit lasts.
        """
        loss, program = self.gradient.loss_fn, self.program
        if not isinstance(loss, PureLoss) or self.arguments.parts[0].axes:
            return
        params = self.trees[0] if 0 in self.trees else self.args[0]
        self.visit, self.first = loss.entered(params, recorded=True), 1
        is_uninterrupted = bool(program.n or program.microbatch_size) and program.weight is None
        if is_uninterrupted and not (loss.buffers or loss.statistics):
            self.visit = nullcontext(stack.enter_context(self.visit))

    def prepared(
        self, arguments: Arguments, kwargs: dict[str, Tree]
    ) -> tuple[Arguments, dict[str, Tree]]:
        """The arguments as the loss is given them: with leaves, and all others without graphs."""

        def part_of(index: int, part: Argument) -> Argument:
            if index in self.trees:
                return part._replace(value=self.trees[index])
            if index in self.plan.moving:
                return part
            if part.axes:
                return part._replace(leaves=detached_leaves(part.leaves, True))
            return part._replace(value=detached(part.value, True))

        parts = tuple([part_of(index, part) for index, part in enumerate(arguments.parts)])
        named = {name: detached(value, True) for name, value in kwargs.items()}
        return replace(arguments, parts=parts), named

    @property
    def state(self) -> list[Any]:
        """What is threaded to the next micro-batch."""
        return self.sums.state if self.sums is not None else []

    # --- what becomes of the output

    def _bind(self, loss: torch.Tensor, aux: Tree, moving: list[torch.Tensor]) -> None:
        """Decides with the first loss what becomes of every leaf of the output."""
        plan, gradient = self.plan, self.gradient
        folding = plan.folding
        is_known = folding is not None and loss.dtype is plan.loss_dtype and type(loss) is torch.Tensor
        if not is_known or gradient.has_aux or self.arguments.state or plan.moving:
            folding = self._folding(loss.detach(), aux, moving)
        assert folding is not None
        if any(leaf.grad is not None for leaf in (*self.inputs, *moving)):
            raise ran_backward()
        self.sums, self.loss_dtype = Sums(folding), loss.dtype
        self.held = [None] * len(self.inputs)
        if folding is not plan.folding:
            self.plan = replace(plan, folding=folding, loss_dtype=loss.dtype)
        for at, (index, leaf) in enumerate(zip(folding.grads, self.inputs, strict=True)):
            dtype = folding.outputs.folds[index].accumulator_dtype  # type: ignore[union-attr]
            if folding.lends and dtype != leaf.dtype:
                # A wider sum begins with zeros: autograd could only begin it in the leaf's dtype.
                total = torch.zeros_like(leaf, dtype=dtype, requires_grad=False)
                self.held[at] = self.sums.of[index] = total
                self._hold(leaf, total)
        self.writes = writes_of(self.inputs)

    @staticmethod
    def _hold(leaf: torch.Tensor, total: torch.Tensor) -> None:
        if total.dtype != leaf.dtype:
            leaf.grad_dtype = None  # .grad may have another dtype than the leaf
        leaf.grad = total

    def _folding(self, loss: torch.Tensor, aux: Tree, moving: list[torch.Tensor]) -> Folding:
        gradient, plan = self.gradient, self.plan
        in_order = [self.trees.get(index, self.micro.get(index)) for index in plan.indices]
        like = gradient.compose(loss, detached(aux, True), in_order)
        outputs, leaves = self.program.bind(like, self.arguments)
        self._check_dense()
        numbered = trees.unflatten(outputs.structure, [*range(len(leaves))])
        parts = gradient.gradient_in(numbered)
        parts = parts if isinstance(gradient.argnums, tuple) else (parts,)
        at = {
            index: [leaf for leaf in trees.flatten(part)[0] if leaves[leaf] is not None]
            for index, part in zip(plan.indices, parts, strict=True)
        }
        in_gradient = {leaf for part in parts for leaf in trees.flatten(part)[0]}
        beside = [leaf for leaf in range(len(leaves)) if leaf not in in_gradient]
        rest = gradient.compose(loss, detached(aux, True), [() for _ in plan.indices])
        return Folding(
            outputs,
            grads=tuple([leaf for index in plan.whole for leaf in at[index]]),
            moved=tuple([leaf for index in plan.moving for leaf in at[index]]),
            beside=tuple(beside),
            rest_outputs=outputs.part(beside, trees.flatten(rest)[1]),
            may_be_wide=self.module is None,
        )

    def _check_dense(self) -> None:
        for index, tree in self.trees.items():
            for position, leaf in enumerate(trees.flatten(tree)[0]):
                if leaf is not None and leaf.layout is not torch.strided:
                    raise FuncgaError(
                        f"`{self.paths(tree, index)[position]}` is a sparse tensor "
                        f"{arrays.describe(leaf)}, and sums of gradients are dense, as parameters "
                        "have to be. Let the values be the parameter, and make the sparse tensor "
                        "of them in loss_fn: torch.sparse_coo_tensor(indices, values, shape)."
                    )

    def paths(self, tree: Tree, index: int) -> list[str]:
        """The paths of the leaves of an argument, for errors."""
        name = "parameters" if index == OWN else argument_names(self.gradient.loss_fn, index + 1)[index]
        return leaf_paths(tree, trees, name)

    # --- graphs that are new

    def _look(self, loss: torch.Tensor, moving: list[torch.Tensor]) -> Graph:
        """Walks the graph of a loss."""
        found = graphs.reach(loss, {id(leaf) for leaf in (*self.inputs, *moving)})
        return Graph(found.custom, None)

    def _note_reached(
        self, loss: torch.Tensor, moving: list[torch.Tensor], weight: float, is_alone: bool
    ) -> None:
        """Notes whether a loss leads to a leaf, until one does.

        A constant is explained by being 0, as where all is masked, or by a gradient inside of the
        loss, such as that of a linear function.
        """
        ids = {id(leaf) for leaf in (*self.inputs, *moving)}
        found = graphs.reach(loss, ids) if loss.requires_grad else None
        if found is not None and (found.own or found.custom):
            self.gradient.reached.add(True)
        elif ids and weight:
            self.unreached |= loss.requires_grad or (is_alone and is_constant(loss))

    # --- the end of the window

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        sums, inputs, plan = self.sums, self.inputs, self.plan
        assert sums is not None
        if not all(map(_REQUIRES_GRAD, inputs)):
            raise switched_off()
        if self.unreached and not self.gradient.reached:
            raise self.gradient.unreached(len(self.args), self.backend)
        if ON and versions_of(self.unwritten) != self.versions:
            raise written()
        if sums.folding.lends:
            check_held(inputs, self.held)
        for index, leaf in zip(sums.folding.grads, inputs, strict=True):
            leaf.grad = None
            if sums.of[index] is None and index in sums.folding.outputs.reduced:
                # No loss of the window depended on it.
                fold = sums.folding.outputs.folds[index]
                assert fold is not None
                sums.of[index] = (
                    torch.zeros_like(leaf, dtype=fold.accumulator_dtype, requires_grad=False)
                    if sums.folding.kinds[index]
                    else fold.identity(leaf.detach())
                )
        return sums.result()


class Again(AbstractContextManager[Any]):
    """A context that can be entered again and again: each time a new one is made."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self.make = make

    def __enter__(self) -> Any:
        self.entered = self.make()
        return self.entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.__exit__(*error)


def outside_of_autocast(devices: set[str]) -> AbstractContextManager[object]:
    """A context outside of autocast, which is for the forward pass."""

    @contextmanager
    def outside() -> Iterator[None]:
        with ExitStack() as stack:
            for device in {"cpu", *devices}:
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    return Again(outside)


def changed() -> FuncgaError:
    """The error for a graph with a function that graphs like it have not had."""
    return FuncgaError(
        "a function written in Python, such as a checkpoint with use_reentrant=True, is in a loss "
        "that earlier calls of this step computed without it, from equally many operations. Make "
        "the step anew where the loss changes so: step = funcga.accumulate(grad_fn, n)."
    )


def holds(dtype: torch.dtype, number: float) -> bool:
    """Whether this dtype holds a number exactly, or rounds it no more than float32 does."""
    return (
        number == 1
        or dtype.itemsize >= 4
        or torch.tensor(number, dtype=dtype, device="cpu").item() == number
    )


_CDATA, _NBYTES = operator.attrgetter("_cdata"), operator.attrgetter("nbytes")


def are_alone(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """For each gradient, True if it is the only owner of its memory, which has exactly its size."""
    storages = [*map(torch.Tensor.untyped_storage, gradients)]
    # Two references to the memory are expected: that of the gradient, and the one in `storages`.
    # Memory that is not torch's own, such as a NumPy array's, cannot be resized. Its owner does not
    # count as a reference.
    return [
        count == 2 and held == needed and resizable
        for count, held, needed, resizable in zip(
            map(_private.use_count, map(_CDATA, storages)),
            map(torch.UntypedStorage.nbytes, storages),
            map(_NBYTES, gradients),
            map(torch.UntypedStorage.resizable, storages),
            strict=True,
        )
    ]


def detached(tree: Tree, recorded: bool = False) -> Tree:
    """The tree without the graphs of its tensors.

    `recorded`: autograd will record them, outside of every transform. Tensors made in inference
    mode are copied then.
    """
    if not recorded and arrays.in_transform():
        return tree
    leaves, structure = trees.flatten(tree)
    without = detached_leaves(leaves, recorded)
    return tree if without is leaves else trees.unflatten(structure, without)


def detached_leaves(leaves: list[Any], recorded: bool = False) -> list[Any]:
    """The same of leaves; these themselves, if none has a graph."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(leaf.requires_grad or (recorded and leaf.is_inference()) for leaf in tensors):
        return leaves
    return [_without_graph(leaf, recorded) for leaf in leaves]


def _without_graph(leaf: Any, recorded: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if recorded and leaf.is_inference():
        with torch.inference_mode(False):
            return leaf.clone()
    return leaf.detach() if leaf.requires_grad else leaf
