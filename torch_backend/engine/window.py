"""The autograd engine: a window of a gradient that funcga itself made, at the cost of the hand-written loop.

Only torch has this file: XLA fuses the sum into the loop by itself.

Each parameter becomes a leaf of the call's own, `p.detach().requires_grad_()`, which shares its memory. So arguments,
modules and their `.grad`s are left alone, and everything that autograd can do works: checkpointing, saved-tensor hooks,
custom functions, compiled losses.
"""

import operator
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcga._backend.prefixes import leaf_paths
from funcga._backend.protocols import Backend
from funcga._call.arguments import Arguments, argument_names
from funcga._call.program import Program
from funcga._call.scales import scaled_loss
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction, evaluations
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.engine.backward import Backward, Routes, autocasting, check_no_backward
from torch_backend.engine.buffers import Buffers, Layout
from torch_backend.engine.hooks import put_hooks
from torch_backend.engine.others import GradsWatch, Surroundings
from torch_backend.engine.recording import is_constant, recording_loss, switched_off
from torch_backend.modules.checks import check_unfrozen
from torch_backend.modules.pure_loss import PureLoss
from torch_backend.modules.visits import own_parameters
from torch_backend.reduce.channel import Listener
from torch_backend.reduce.reduction import Reduction


class Engine:
    """One window of a program whose grad_fn is a GradientFunction: `fold` each micro-batch, then take the `result`."""

    records = True

    def __init__(self, program: Program, gradient: GradientFunction, backend: Backend, reduction: Reduction | None):
        self.program, self.gradient, self.backend, self.reduction = program, gradient, backend, reduction
        self.looks_ahead = self.may_be_short = reduction is not None
        self.whole: dict[int, _Leaves] = {}  # what is differentiated and the same for every micro-batch, by argument
        self.places: tuple[int, ...] = ()  # of all arguments that are differentiated
        self.arity = 0  # how many arguments a call has
        self.first = 0  # the first argument that loss_fn takes
        self.inference: Any = _NOTHING
        # what the loss is called in: for a pure_loss, while the parameters are in its module
        self.visit: Any = nullcontext(gradient.loss_fn)
        self.watch, self.hooked = GradsWatch(()), False
        self.unreached = False  # whether a loss came to no leaf that should have

    def detached(self, args: tuple[Any, ...], leading: bool = False) -> tuple[Any, ...]:
        """The arguments, or the leading ones of a stream, without graphs, but for those that leaves are made of."""
        argnums = self.gradient.argnums
        found = argnums if isinstance(argnums, tuple) else (argnums,)
        found = found if leading else self.gradient.places(len(args))
        return tuple([arg if i in found else detached(arg, recorded=True) for i, arg in enumerate(args)])

    def __enter__(self) -> "Engine":
        self.any_group = Listener()
        self.given_group = Listener(None if self.reduction is None else self.reduction.replicas.group)
        if torch.is_inference_mode_enabled():
            self.inference = torch.inference_mode(False)  # what is made in it has no gradient
            self.inference.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inference.__exit__(*error)
        if error[0] is not None and self.reduction is not None:
            self.reduction.give_up()
        self.watch.changed()  # what an exception leaves behind is put right too
        if autocasting(("cuda",)):
            torch.clear_autocast_cache()  # of the casts of leaves that nobody will see again

    def fold(
        self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any, last: bool
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        begins, before = not self.places, evaluations()
        if begins:
            self._enter(arguments, args)
        found, moving = self.whole, _NO_LEAVES
        if len(found) < len(self.places):
            found = {i: found[i] if i in found else self._leafy(args[i], i) for i in self.places}
            moving = [leaf for i in found if i not in self.whole for leaf in found[i].leaves if leaf is not None]
        called = [found[i].tree if i in found else arg for i, arg in enumerate(args)][self.first :]
        scale = None
        if kwargs or self.gradient.scaled:
            scale, kwargs = self.gradient.read_scale(kwargs, self.backend)
        with self.visit as loss_fn:
            with recording_loss(), _NOTHING if torch.is_grad_enabled() else torch.enable_grad():
                loss, aux = self.gradient.split(loss_fn(*called, **kwargs), self.backend)
                differentiated = scaled_loss(loss, scale, arrays)
            if self.gradient.has_aux:
                aux = detached(aux)
            if begins:
                self._bind(loss.detach(), aux, found, arguments, weight)
            else:
                self.backward.check_untouched()
            ready = None
            self._listen()
            if last and self.reduction is not None and self.reduction.overlaps:
                self.reduction.announce(weight, steps=1)
                ready = self.reduction.ready
            try:
                arrivals = None if self.gradient.reached else self._arrivals(found)
                with recording_loss():  # as checkpoints run parts of the loss again, with the parameters in the module
                    self.backward(differentiated, weight, moving, ready, self.any_group.heard)
            except RuntimeError as error:
                leaves = [leaf for own in found.values() for leaf in own.leaves if leaf is not None]
                if all(leaf.requires_grad for leaf in leaves):
                    raise
                raise switched_off() from error
        if arrivals is not None and not arrivals():
            self.unreached |= self._should_reach(loss, weight, evaluations() == before)
        state = self.buffers.add(self._leaves(loss.detach(), aux, found), weight)
        self.backward.settle()
        return state

    def _listen(self) -> None:
        """Remembers a loss that calls collectives of the group that gradients may travel over."""
        if self.reduction is not None and self.given_group.heard:
            self.reduction.history.communicates = True

    def _arrivals(self, found: "dict[int, _Leaves]") -> Callable[[], bool]:
        """A function that says, after the next backward pass, whether a gradient came to a leaf, or there is none."""
        leaves = [leaf for leaves in found.values() for leaf in leaves.leaves if leaf is not None]
        note: Any = lambda _: self.gradient.reached.add(True)
        hooks = [leaf.register_hook(note) for leaf in leaves]  # type: ignore[no-untyped-call]

        def arrived() -> bool:
            for hook in hooks:
                hook.remove()
            return bool(self.gradient.reached) or not leaves

        return arrived

    def _should_reach(self, loss: torch.Tensor, weight: Any, alone: bool) -> bool:
        """Whether a loss that came to no leaf is wrong: it has a graph, or is a constant that nothing explains.

        A constant is right where all is masked, 0; where another gradient is inside, as that of a linear function, so
        that the loss is not `alone`; and where other replicas have more.
        """
        if not float(weight):
            return False
        return loss.requires_grad or (alone and self.reduction is None and is_constant(loss))

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output."""
        if self.unreached and not self.gradient.reached:
            raise self.gradient.unreached(self.arity, self.backend)
        self.backward.release()
        self.watch.check()
        self.buffers.settle(self.backward.leaves)
        if self.reduction is not None:
            if not self.reduction.sums.sent:
                self._listen()  # to the last backward pass too
            state = self.reduction.finish(state)
        return self.buffers.result(state)

    def result_without_microbatches(self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]) -> Tree:
        """The result of the other replicas."""
        assert self.reduction is not None
        return result_of_others(self.program, self.reduction, arguments, state)

    def _enter(self, arguments: Arguments, args: tuple[Any, ...]) -> None:
        """Makes leaves of what is differentiated, the same for the whole window where the argument is."""
        self.arity, self.places = len(args), self.gradient.places(len(args))
        whole = [not part.axes for part in arguments.parts]
        self.whole = {i: self._leafy(args[i], i) for i in self.places if whole[i]}
        watched = [p for leaves in self.whole.values() for p in leaves.originals]
        self.watch = GradsWatch(watched)
        loss_fn = self.gradient.loss_fn
        in_module = isinstance(loss_fn, PureLoss) and whole[0]
        trees = {i: args[i] for i in self.whole}  # and not the micro-batch, which is not to be kept
        paths = lambda: [path for i, tree in trees.items() for path in self._paths(tree, i)]
        self.around = Surroundings(watched, paths, self.gradient, in_module)
        if isinstance(loss_fn, PureLoss) and in_module:
            params = self.whole[0].tree if 0 in self.whole else args[0]
            self.visit, self.first = loss_fn.entered(params, recorded=True), 1

    def _leafy(self, tree: Any, i: int) -> "_Leaves":
        leaves, structure = self.backend.trees.flatten(tree)
        leaves = own_parameters(leaves)
        check_unfrozen(leaves, tree, self.gradient, i)
        try:
            made = [leaf if leaf is None else leaf.detach().requires_grad_() for leaf in leaves]
        except (RuntimeError, AttributeError, ValueError):  # numbers, integers, or tensors of inference mode
            self.gradient.check_leaves(tree, i, self.backend)
            made = [
                leaf if leaf is None else torch.as_tensor(leaf).detach().clone().requires_grad_() for leaf in leaves
            ]
        self.hooked |= put_hooks(leaves, made, lambda: self._paths(tree, i))
        return _Leaves(self.backend.trees.unflatten(structure, made), made, structure, leaves)

    def _paths(self, tree: Any, i: int) -> list[str]:
        return leaf_paths(tree, self.backend.trees, argument_names(self.gradient.loss_fn, i + 1)[i])

    def _bind(self, loss: Any, aux: Any, found: "dict[int, _Leaves]", arguments: Arguments, weight: Any) -> None:
        """Decides with the first loss what becomes of every leaf of the output, and makes room for it."""
        check_no_backward([leaf for leaves in found.values() for leaf in leaves.leaves])
        kept, key = self.program.keep(Plans), None
        if not self.gradient.has_aux and len(self.whole) == len(self.places) and not arguments.carried():
            # then the output is known by what is differentiated, and so is a plan made for it before
            key = loss.dtype, [(leaves.structure, leaves.kinds()) for leaves in found.values()]
        plan = kept.plan
        if key is None or plan is None or plan.key != key:
            plan = kept.plan = self._planned(key, loss, aux, found, arguments)
        self.plan: _Plan = plan
        self.buffers = Buffers(self.plan.layout)
        if self.reduction is not None:
            leaves = self.gradient.compose(loss, aux, [found[i].tree for i in self.places])
            if self.any_group.heard:
                # cotangents meet in the backward pass, and have to be in one unit on all replicas
                self.buffers.unit, self.buffers.unit_is_fixed = 1.0, True
            self.reduction.begin(self.buffers, trees.flatten(leaves)[0])
        leaves = self._given(plan.given)
        self.backward = Backward(self.buffers, leaves, plan.routes, self.around, seeds=not self.hooked)

    def _given(self, places: Iterable[int]) -> dict[int, torch.Tensor]:
        """The leaves whose gradients autograd adds, by these places in the output; but for those that are None."""
        leaves = [leaf for leaves in self.whole.values() for leaf in leaves.leaves]
        return {k: leaf for k, leaf in zip(places, leaves, strict=True) if leaf is not None}

    def _planned(self, key: Any, loss: Any, aux: Any, found: "dict[int, _Leaves]", arguments: Arguments) -> "_Plan":
        compose, trees = self.gradient.compose, self.backend.trees
        for i in self.places:
            self._check_dense(found[i], i)
        outputs, leaves = self.program.bind(compose(loss, aux, [found[i].tree for i in self.places]), arguments)
        # the gradients are the last of what grad_fn returns, or the first
        place = len(leaves) - sum(len(found[i].leaves) for i in self.places) if self.gradient.with_value else 0
        given: dict[int, None] = {}  # in order
        for i in self.places:
            if i in self.whole:
                given.update(dict.fromkeys(range(place, place + len(found[i].leaves))))
            place += len(found[i].leaves)
        own = [k for k in range(len(leaves)) if k not in given]
        rest = [() if i in self.whole else found[i].tree for i in self.places]
        head = outputs.part(own, trees.flatten(compose(loss, aux, rest))[1])
        layout = Layout(outputs, given)
        return _Plan(key, layout, Routes(layout, self._given(given), self.gradient.scaled), [*given], own, head)

    def _check_dense(self, leaves: "_Leaves", i: int) -> None:
        """Raises FuncgaError for a sparse parameter; a sparse gradient of a dense one is summed."""
        for place, leaf in enumerate(leaves.leaves):
            if leaf is not None and leaf.layout is not torch.strided:
                path = self._paths(self.backend.trees.unflatten(leaves.structure, leaves.leaves), i)[place]
                raise FuncgaError(
                    f"`{path}` is a sparse tensor {arrays.describe(leaf)}, and sums of gradients are dense, as "
                    f"parameters have to be. Let the values be the parameter, and make the sparse tensor of them in "
                    f"loss_fn: torch.sparse_coo_tensor(indices, values, shape)."
                )

    def _leaves(self, loss: Any, aux: Any, found: "dict[int, _Leaves]") -> list[Any]:
        """The leaves of what grad_fn returns, None where the gradient is added already."""
        leaves: list[Any] = [None] * len(self.plan.layout.outputs.folds)
        alone = self.gradient.with_value and not self.gradient.has_aux and self.plan.own == [0]
        if alone and self.plan.head.dtypes[0] == loss.dtype:
            leaves[0] = loss  # nothing else, as usual
            return leaves
        rest = [() if i in self.whole else found[i].gradients(self.backend) for i in self.places]
        value = self.gradient.compose(loss, aux, rest)
        which = f"micro-batch {self.buffers.steps + 1}"
        for k, leaf in zip(self.plan.own, self.plan.head.leaves(value, which), strict=True):
            leaves[k] = leaf
        return leaves


class _Plan(NamedTuple):
    """What becomes of each leaf of an output: `given`, whose gradients autograd adds, and `own`, which are returned."""

    key: Any
    layout: Layout
    routes: Routes
    given: list[int]
    own: list[int]
    head: Outputs  # of `own` alone


@dataclass(eq=False)
class Plans:
    """The plan of a step's last window, for the next one with outputs of the same kinds."""

    plan: _Plan | None = None


class _Leaves(NamedTuple):
    """One argument that is differentiated: its tree, made of leaves that autograd records; None is none of them."""

    tree: Any
    leaves: list[torch.Tensor | None]
    structure: Any
    originals: list[Any]

    def kinds(self) -> list[Any]:
        """What a fold sees of each leaf."""
        if {*map(type, self.leaves)} == {torch.Tensor}:  # as usual
            return [*map(_KIND, self.leaves)]
        return [None if leaf is None else (*_KIND(leaf), getattr(leaf, "placements", None)) for leaf in self.leaves]

    def gradients(self, backend: Backend) -> Any:
        """The tree of what the last backward pass has left in the leaves; zeros where it did not come."""
        grads = [
            None if leaf is None else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves
        ]
        return detached(backend.trees.unflatten(self.structure, grads))


_KIND = operator.attrgetter("shape", "dtype", "layout")
_NOTHING = nullcontext()
_NO_LEAVES: list[torch.Tensor] = []


def result_of_others(program: Program, reduction: Reduction, arguments: Arguments, state: list[Any]) -> Tree:
    """The result on a replica that has nothing to fold; `arguments` are all that it was called with."""
    leaves = [leaf for part in arguments.parts for leaf in trees.flatten(part.value)[0] if arrays.is_array(leaf)]
    device = leaves[0].device if leaves else torch.device("cpu")
    reduction.take_part(lambda value: program.bind(value, arguments)[0], device)
    state = reduction.finish(state)
    return reduction.buffers.result(state)


def detached(tree: Any, recorded: bool = False) -> Any:
    """The tree without the graphs of its tensors, and for autograd to record without those made in inference mode."""
    if arrays.in_transform():
        return tree
    if isinstance(tree, torch.Tensor):
        if recorded and tree.is_inference():
            with torch.inference_mode(False):
                return tree.clone()
        return tree.detach() if tree.requires_grad else tree
    leaves, structure = trees.flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(leaf.requires_grad or (recorded and leaf.is_inference()) for leaf in tensors):
        return tree
    made = [detached(leaf, recorded) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return trees.unflatten(structure, made)
