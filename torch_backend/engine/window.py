"""The autograd engine: a window of a gradient that funcga itself made, at the cost of the
hand-written loop.

Only torch has this file: XLA fuses the sum into the loop by itself.

For each parameter the call makes a leaf of its own, `p.detach().requires_grad_()`, which shares the
parameter's memory. So arguments, modules and their `.grad`s stay as they are, and everything that
autograd can do works: checkpointing, saved-tensor hooks, custom functions, compiled losses. Of a
module's own gradients the leaves are its parameters themselves, whose `.grad`s are put aside
meanwhile.
"""

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments, argument_names
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction, evaluations, scaled_loss
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.dtensor import as_dtensor, is_dtensor, local
from torch_backend.engine.backward import Backward, ran_backward
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.layout import Kept, Layout, Leaves
from torch_backend.engine.observing import ObservedGradient, Observing
from torch_backend.engine.others import GradsWatch, Surroundings, applied, left_alone
from torch_backend.gradients import is_constant, put_hooks, switched_off
from torch_backend.modules import PureLoss
from torch_backend.modules.checks import check_no_params, check_unfrozen
from torch_backend.modules.functional import noted, recomputing
from torch_backend.modules.layers import Walk, called
from torch_backend.modules.visits import IN_USE
from torch_backend.replacements import replacements
from torch_backend.replicas import Listener, Replicas

_NOTHING = nullcontext()
_OWN = -1  # in place of the index of an argument: the module's own parameters


class Merge(Protocol):
    """What merges a window over replicas.

    `unweighed`: whether gradients of other replicas' losses came in, and nothing had weighed them;
    `weights`: those of the micro-batches.
    """

    replicas: Replicas
    unweighed: bool
    weights: set[Scalar]

    def begin(self, buffers: Buffers, leaves: Sequence[Array]) -> None:
        """Takes the buffers of a window whose first micro-batch has these leaves."""
        ...

    def take_part(self, bind: Callable[[Tree], Outputs], arguments: Arguments) -> Buffers:
        """The buffers of a replica without any micro-batch."""
        ...

    def finish(self, state: list[Array]) -> list[Array]:
        """Merges the buffers, and returns the state that is threaded on."""
        ...

    def give_up(self) -> None:
        """Tells the other replicas of an error."""
        ...


class Engine:
    """One window of a gradient that autograd computes: `fold` each micro-batch, then take the
    `result`.

    With a `module` the gradients are those of its own parameters, and `gradient` is that of
    `loss_fn(module, *args)`.
    """

    records = True
    looks_ahead = False
    detaches_aux = True  # whether what comes with a loss has no graph

    def __init__(
        self,
        program: Program,
        gradient: GradientFunction,
        backend: Backend,
        reduction: Merge | None,
        module: nn.Module | None = None,
    ):
        self.program, self.gradient = program, gradient
        self.backend, self.reduction = backend, reduction
        # What is folded is the output of this gradient function, and `buffers_of(layout)` makes
        # what it is folded into.
        self.folded = gradient
        self.buffers_of: Callable[[Layout], Buffers] = Buffers
        self.module = module
        self.may_be_short = reduction is not None
        # Whether leaves may have what the losses of other replicas add to them.
        self.mixes = reduction is not None and reduction.replicas.leaves is not None
        self.kept = program.memory.keep(Kept)
        # Which arguments are differentiated; None before the arguments are read.
        self.argnums: tuple[int, ...] | None = None if module is None else (_OWN,)
        self.backward: Backward | None = None  # None before the first loss
        self.hooked = False  # whether a parameter has hooks
        self.watch: GradsWatch | None = None
        self.stack = ExitStack()  # of the contexts that last as long as the window
        # Whether no code of the user's runs between two micro-batches.
        self.is_uninterrupted = (
            bool(program.n or program.microbatch_size) and program.weight is None
        )
        # Whether the replicas merge the shards of parameters that lie on other meshes, once the
        # window is over.
        self.merges_shards = False
        self.observing: Observing | None = None  # what observers are told, from the first loss on
        self.unreached = False  # whether a loss reached no leaf, though it should have
        self.listener: Listener | None = None  # hears a loss that calls collectives itself

    def __enter__(self) -> Self:
        self.noted_around = noted.calls, noted.last  # those of a loss around this window
        noted.last = () if self.is_uninterrupted else None
        if dist.is_available() and dist.is_initialized():
            self.listener = Listener()
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode can never have a gradient, so the whole window runs
            # outside of it.
            self.stack.enter_context(torch.inference_mode(False))
        self.stack.enter_context(replacements)
        return self

    def __exit__(self, *error: Any) -> None:
        noted.calls, noted.last = self.noted_around
        if self.observing is not None:
            self.observing.end()
        if error[0] is not None and self.reduction is not None:
            self.reduction.give_up()
        # After an exception, too, modules and `.grad`s are as before.
        if self.watch is not None:
            self.watch.changed()
        self.stack.__exit__(*error)
        # Autocast caches a cast of each leaf. The leaves end with the window, and the casts would
        # outlive them.
        if _private.is_any_autocast_enabled():
            torch.clear_autocast_cache()

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs, except those that are differentiated; `leading`: those
        of a stream.
        """
        if self.module is not None:
            check_no_params(args, self.module)
        if leading and self.argnums is None:
            # How many arguments there are shows only with the first micro-batch.
            entries = self.gradient.argnums
            argnums = entries if isinstance(entries, tuple) else (entries,)
        else:
            argnums = self._differentiated(len(args))
        return tuple(
            [
                arg if argnum in argnums else detached(arg, recorded=True)
                for argnum, arg in enumerate(args)
            ]
        )

    def _differentiated(self, count: int) -> tuple[int, ...]:
        """Which of `count` arguments are differentiated."""
        if self.argnums is None:
            argnums = self.kept.argnums.get(count)
            if argnums is None:
                argnums = self.kept.argnums[count] = self.gradient.arg_indices(count)
            self.argnums = argnums
        return self.argnums

    # --- a micro-batch

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        if self.backward is None:
            self._begin(arguments, args)
        # `moving` are the leaves of arguments that are split: this micro-batch's own. The others
        # live for the window.
        leaves, moving = (self.leaves, ()) if self.is_whole else self._with_those_of(args)
        called = [
            leaves[argnum].tree if argnum in leaves else arg for argnum, arg in enumerate(args)
        ][self.first :]
        # Watches for a first gradient, until a leaf has got one.
        arrivals = None if self.gradient.reached else Arrivals(self.gradient)
        noted.calls = []
        with self.visit as loss_fn:
            loss, aux, differentiated = self._evaluate(loss_fn, called, kwargs)
            # The first loss shows what becomes of the output. Accumulators have to be there before
            # its backward pass.
            if self.backward is None:
                self.backward = self._bind(loss.detach(), aux, leaves, moving, arguments)
            communicates = self.listener is not None and self.listener.heard
            # A checkpoint runs parts of the loss again in the backward pass: it needs the
            # parameters in the module then.
            with recomputing(applied.last is self.since) if noted.calls else recording_loss():
                try:
                    # Hooks are put on the leaves only now: a loss that has switched one off is
                    # found out here at once.
                    if arrivals is not None:
                        arrivals.watch(tensors_of(leaves))
                    share = self.backward(differentiated, weight, moving, communicates)
                except BaseException as error:
                    explain(error, leaves, arrivals)
                    raise

        if arrivals is not None:
            self.unreached |= arrivals.are_missed(loss, weight, alone=self.reduction is None)
        loss, state = loss.detach(), list[Any]()
        if share is not None and loss.dtype == self.lone_dtype:
            self.buffers.add_value(loss, weight, share)
        else:
            state = self._add_beside(self.backward, loss, aux, leaves, weight)
        if self.reduction is not None:
            # In a bucket all sums are views of one memory. Adding the loss has raised the version
            # of every one of them.
            self.backward.settle()
        return state

    def _add_beside(
        self,
        backward: Backward,
        loss: torch.Tensor,
        aux: Tree,
        leaves: "dict[int, Leaves]",
        weight: Scalar,
    ) -> list[Any]:
        """Folds in what stands beside the gradients that autograd has added, and returns the
        state that is threaded.
        """
        if (
            self.observing
            and loss.dtype == self.noted_dtype
            and (share := self.buffers.share(weight)) is not None
        ):
            self.buffers.add_value(loss, weight, share)
            self.observing.note(weight, backward.seed)
            return []
        to_add = self._leaves_to_add(loss, aux, leaves)
        self._add_noted()
        if self.observing is not None:
            told = self.observing.told(to_add, weight, backward.seed)
            to_add[: len(told)] = told
        return self.buffers.add(to_add, weight)

    def _add_noted(self) -> None:
        """Folds in what observers are told of the micro-batches that are noted."""
        for told, weight in () if self.observing is None else self.observing.noted():
            for leaf_index, leaf in enumerate(told):
                self.buffers.add_leaf(leaf_index, leaf, weight)

    def _begin(self, arguments: Arguments, args: tuple[Tree, ...]) -> None:
        """Makes leaves of the arguments that are differentiated and are not split."""
        self.since = applied.last if applied.is_noted else None
        if self.module is not None:
            self._begin_with_parameters(self.module)
            return
        self.arity, argnums = len(args), self._differentiated(len(args))
        self.whole_args = {
            argnum: args[argnum] for argnum in argnums if not arguments.parts[argnum].axes
        }
        self.is_whole = len(self.whole_args) == len(argnums)
        self.leaves = {
            argnum: self.leaves_of(arg, argnum) for argnum, arg in self.whole_args.items()
        }
        # A loss that runs .backward() on the parameters themselves would write to their `.grad`s.
        originals = [original for leaves in self.leaves.values() for original in leaves.originals]
        self.watched = [
            tensor
            for tensor in originals
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]
        if self.watched:
            self.watch = GradsWatch(self.watched)
        # The context that the loss is called in, and the first argument that it is given.
        self.visit: AbstractContextManager[Callable[..., Any]] = nullcontext(self.gradient.loss_fn)
        self.first = 0
        if isinstance(self.gradient.loss_fn, PureLoss) and not arguments.parts[0].axes:
            self._begin_visit(
                self.gradient.loss_fn, self.leaves[0].tree if 0 in self.leaves else args[0]
            )

    def _begin_visit(self, loss: PureLoss, params: Tree) -> None:
        """Lets a pure_loss be called in its module, which has the parameters meanwhile: it is
        given none.
        """
        self.visit, self.first = loss.entered(params, recorded=True), 1
        if (
            self.is_uninterrupted
            and self.reduction is None
            and not (loss.buffers or loss.statistics)
        ):
            # One visit lasts for the window. Otherwise the module is as it was between
            # micro-batches.
            self.visit = nullcontext(self.stack.enter_context(self.visit))

    def _begin_with_parameters(self, module: nn.Module) -> None:
        """Takes the module's own parameters for the leaves. None of them is an argument."""
        walk = self.program.memory.keep(Walk)
        self.stack.enter_context(IN_USE.using(walk.ids(module)))
        params = walk.trainable(module)
        leaves: list[torch.Tensor | None] = [*params.values()]
        structure = trees.flatten(params)[1]
        self.arity, self.whole_args, self.is_whole = 0, {_OWN: params}, True
        self.leaves = {_OWN: Leaves(params, leaves, structure, leaves)}
        if not are_plain(leaves):
            self.hooked = put_hooks(leaves, leaves, lambda: self._paths(params, _OWN))
        self.stack.enter_context(left_alone(params.values()))
        self.merges_shards = self.reduction is not None and any(map(is_dtensor, leaves))
        self.visit, self.first = nullcontext(partial(called, self.gradient.loss_fn, module)), 0

    def _with_those_of(
        self, args: tuple[Tree, ...]
    ) -> "tuple[dict[int, Leaves], list[torch.Tensor]]":
        """All leaves, and the tensors among them that only this micro-batch has: these get their
        `.grad`.
        """
        argnums = self._differentiated(len(args))
        moving = {
            argnum: self.leaves_of(args[argnum], argnum)
            for argnum in argnums
            if argnum not in self.leaves
        }
        leaves = {
            argnum: moving[argnum] if argnum in moving else self.leaves[argnum]
            for argnum in argnums
        }
        return leaves, tensors_of(moving)

    def leaves_of(self, tree: Tree, argnum: int) -> "Leaves":
        """Leaves of an argument, with its hooks. Raises FuncgaError if it cannot be
        differentiated.
        """
        originals, structure = trees.flatten(tree)
        is_plain = are_plain(originals)
        if not is_plain:
            check_unfrozen(originals, tree, self.gradient, argnum)
        try:
            leaves = [
                leaf if leaf is None else leaf.detach().requires_grad_() for leaf in originals
            ]
        except (RuntimeError, AttributeError, ValueError):
            # Python numbers, integer tensors, or tensors made in inference mode. The check says
            # which cannot be differentiated at all; the others are copied.
            self.gradient.check_leaves(tree, argnum, self.backend)
            copies = [
                leaf if leaf is None else torch.as_tensor(leaf).detach().clone()
                for leaf in originals
            ]
            leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in copies]
        if not is_plain:
            self.hooked |= put_hooks(originals, leaves, lambda: self._paths(tree, argnum))
        return Leaves(trees.unflatten(structure, leaves), leaves, structure, originals)

    def whole(self, args: tuple[Tree, ...]) -> Arguments:
        """The arguments as a single, unsplit micro-batch."""
        return Arguments(
            tuple([Argument(arg, [], [], None) for arg in args]), self.gradient, self.backend
        )

    def _paths(self, tree: Tree, argnum: int) -> list[str]:
        name = (
            "parameters"
            if argnum == _OWN
            else argument_names(self.gradient.loss_fn, argnum + 1)[argnum]
        )
        return leaf_paths(tree, trees, name)

    def _evaluate(
        self, loss_fn: Callable[..., Any], args: list[Tree], kwargs: dict[str, Tree]
    ) -> tuple[torch.Tensor, Tree, torch.Tensor]:
        """(the loss, its aux, the loss times its scale, which is differentiated)."""
        scale, gradient = None, self.gradient
        if kwargs or gradient.scaled:
            scale, kwargs = gradient.read_scale(kwargs, self.backend)
        with recording_loss(), _NOTHING if torch.is_grad_enabled() else torch.enable_grad():
            loss, aux = loss_fn(*args, **kwargs), None
            # The usual output is a plain scalar. Anything else is split, and checked, by the
            # gradient function.
            is_real_scalar = (
                type(loss) is torch.Tensor and not loss.ndim and loss.dtype.is_floating_point
            )
            if gradient.has_aux or not is_real_scalar:
                loss, aux = gradient.split(loss, self.backend)
            differentiated = loss if scale is None else scaled_loss(loss, scale, arrays)
        return (
            loss,
            detached(aux) if self.detaches_aux and gradient.has_aux else aux,
            differentiated,
        )

    def _leaves_to_add(
        self, loss: torch.Tensor, aux: Tree, leaves: "dict[int, Leaves]"
    ) -> list[Any]:
        """The leaves of what grad_fn returns; None for gradients that autograd has added
        already.
        """
        gradients = [
            () if argnum in self.leaves else _gradients(argument)
            for argnum, argument in leaves.items()
        ]
        value = self.folded.compose(loss, aux, gradients)
        which = f"micro-batch {self.buffers.steps + 1}"
        to_add: list[Any] = [None] * len(self.layout.outputs.folds)
        for leaf_index, leaf in zip(
            self.layout.rest_leaves, self.layout.head.leaves(value, which), strict=True
        ):
            to_add[leaf_index] = leaf
        return to_add

    # --- what becomes of the output

    def _bind(
        self,
        loss: torch.Tensor,
        aux: Tree,
        leaves: "dict[int, Leaves]",
        moving: Sequence[torch.Tensor],
        arguments: Arguments,
    ) -> Backward:
        """Decides with the first loss what becomes of every leaf of the output, and makes room
        for it.
        """
        whole = [leaf for argument in self.leaves.values() for leaf in argument.leaves]
        present = [leaf for leaf in whole if leaf is not None]
        if {*map(type, map(_GRAD, (*present, *moving)))} - {type(None)}:
            raise ran_backward()
        if self.program.observers is not None:
            value = self.gradient.compose(
                loss, aux, [argument.tree for argument in leaves.values()]
            )
            readings = self.program.readings(value, arguments)
            self.folded = observed = ObservedGradient.of(self.gradient, readings, loss)
        bind = partial(self.program.bind, arguments=arguments)
        check = lambda _: self._check_dense(leaves)
        layout = self.kept.layout_of(
            self.folded, (loss, aux), leaves, self.leaves, bind, check, bool(arguments.state)
        )
        self.layout, self.buffers = layout, self.buffers_of(layout)
        # The dtype of the loss, if it is all that is added beside the gradients, and None
        # otherwise.
        is_lone = layout.is_loss_alone and self.gradient.with_value and type(loss) is torch.Tensor
        self.noted_dtype = layout.outputs.dtypes[layout.outputs.before] if is_lone else None
        self.lone_dtype = self.noted_dtype if self.program.observers is None else None
        if self.reduction is not None:
            value = self.folded.compose(loss, aux, [argument.tree for argument in leaves.values()])
            self._begin_reduction(self.reduction, value)
        # Each write to a tensor raises its version: the sum tells whether a parameter was changed
        # during the window.
        self.versions = sum(map(_private.version, present))
        leaves_in_backward = dict(zip(layout.present, present, strict=True))
        if self.program.observers is not None:
            self.observing = Observing(readings, leaves_in_backward, observed.before[0][0])
        # Without a cycle of references: what the window holds, such as the leaves, is freed as soon
        # as it is over.
        itself = weakref.ref(self)
        around = lambda: itself().around  # type: ignore[union-attr]
        # A user's hook on a parameter is to see the gradient of the loss, and not that times a
        # weight.
        return Backward(
            self.buffers, leaves_in_backward, around, self.since, not self.hooked, self.mixes
        )

    def _begin_reduction(self, reduction: Merge, value: Tree) -> None:
        """Lets the sums of outputs like this value begin in the memory that will be sent."""
        if self.mixes or (self.listener is not None and self.listener.heard):
            # Collectives of the loss add cotangents of several replicas, so these must be in one
            # unit.
            self.buffers.unit, self.buffers.unit_is_fixed = 1.0, True
        self.likes = trees.flatten(value)[0]
        if not self.merges_shards:
            reduction.begin(self.buffers, self.likes)

    def _check_dense(self, leaves: "dict[int, Leaves]") -> None:
        """Raises FuncgaError for a sparse parameter; a sparse gradient of a dense one is summed."""
        positions = [
            (argnum, position)
            for argnum in leaves
            for position in range(len(leaves[argnum].leaves))
        ]
        for argnum, position in positions:
            leaf = leaves[argnum].leaves[position]
            if leaf is not None and leaf.layout is not torch.strided:
                path = self._paths(leaves[argnum].tree, argnum)[position]
                raise FuncgaError(
                    f"`{path}` is a sparse tensor {arrays.describe(leaf)}, and sums of gradients "
                    "are dense, as parameters have to be. Let the values be the parameter, and "
                    "make the sparse tensor of them in loss_fn: torch.sparse_coo_tensor(indices, "
                    "values, shape)."
                )

    @cached_property
    def around(self) -> Surroundings:
        """What functions of the loss may write to in backward passes of their own."""
        paths = lambda: [
            path for argnum, tree in self.whole_args.items() for path in self._paths(tree, argnum)
        ]
        originals = [original for leaves in self.leaves.values() for original in leaves.originals]
        in_module = self.first == 1 or self.module is not None
        return Surroundings(originals, paths, self.gradient, in_module)

    # --- the end of the window

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        assert self.backward is not None
        if self.unreached and not self.gradient.reached:
            raise self.gradient.unreached(self.arity, self.backend)
        # A module may write to parameters of its own, as an embedding with max_norm does.
        if (
            self.module is None
            and sum(map(_private.version, self.backward.inputs)) != self.versions
        ):
            raise changed_in_place()
        if self.observing is not None:
            self._add_noted()
        # The leaves give the accumulators back: from here on only the buffers hold them.
        self.backward.release()
        if self.watch is not None:
            self.watch.check()
        self.buffers.settle(self.backward.leaves)
        if self.reduction is None:
            return self.buffers.result(state)
        if self.merges_shards:
            self.buffers.reduced = [*map(local, self.buffers.reduced)]
            self.reduction.begin(self.buffers, [*map(local, self.likes)])
        self.reduction.unweighed, self.reduction.weights = (
            self.backward.unweighed,
            self.backward.weights,
        )
        state = self.reduction.finish(state)
        return self._on_meshes(self.buffers.result(state))

    def _with_own_leaves(self, result: Tree) -> Tree:
        """A result with the module's own parameters in place of the gradients."""
        before, value = ((), result) if self.program.observers is None else result
        value = value[0], self.leaves[_OWN].tree
        return value if self.program.observers is None else (before, value)

    def _on_meshes(self, result: Tree) -> Tree:
        """The result with the gradients of a module where its parameters lie."""
        if not self.merges_shards:
            return result
        before, (value, grads) = ((), result) if self.program.observers is None else result
        grads = {name: as_dtensor(grads[name], p) for name, p in self.leaves[_OWN].tree.items()}
        return (value, grads) if self.program.observers is None else (before, (value, grads))

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]
    ) -> Tree:
        """The result on a replica that has nothing to fold."""
        assert self.reduction is not None
        bind, with_arrays = lambda value: self.program.bind(value, arguments)[0], arguments
        if self.module is not None:
            self._begin_with_parameters(self.module)
            # The others say what their shards are like, and here the parameters are.
            bind = lambda value: self.program.bind(self._with_own_leaves(value), arguments)[0]
            with_arrays = self.whole((self.leaves[_OWN].tree,))
        buffers = self.reduction.take_part(bind, with_arrays)
        return self._on_meshes(buffers.result(self.reduction.finish(state)))


def changed_in_place() -> FuncgaError:
    """The error for parameters that were written to in a window."""
    return FuncgaError(
        "a parameter was changed in place during the window, by loss_fn or by another thread: the "
        "gradients of its micro-batches were taken at different parameter values. Write to a copy, "
        "`p = p + ...`, and update the parameters when the window is done."
    )


def explain(
    error: BaseException, leaves: Mapping[int, Leaves], arrivals: "Arrivals | None"
) -> None:
    """Raises FuncgaError if an error of a backward pass comes of a leaf that was switched off;
    returns for all others.

    Nothing is noted any more then.
    """
    if arrivals is not None:
        arrivals.end()
    if isinstance(error, RuntimeError) and not all(
        leaf.requires_grad for leaf in tensors_of(leaves)
    ):
        raise switched_off() from error


def _gradients(argument: Leaves) -> Tree:
    """The tree of what the last backward pass has left in the leaves; zeros where it did not
    come.
    """
    grads = [
        None if leaf is None else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for leaf in argument.leaves
    ]
    return detached(trees.unflatten(argument.structure, grads))


def are_plain(leaves: Sequence[Any]) -> bool:
    """Whether no leaf that is made of these needs to know more than the tensor: no hooks, no marks,
    nothing frozen.

    This glance at all of them is cheap. Only where it is False is each looked at.
    """
    types = {*map(type, leaves)}
    if not types <= {torch.Tensor, nn.Parameter} or (
        nn.Parameter in types and not all(map(_REQUIRES_GRAD, leaves))
    ):
        return False
    # A mark in the `__dict__` is, for example, that of a stand-in for a module's parameter.
    looks = _DICT, _private.has_hooks, _private.has_hooks_on_grad
    return not any(any(map(look, leaves)) for look in looks)


_GRAD, _REQUIRES_GRAD, _DICT = (
    operator.attrgetter(name) for name in ("grad", "requires_grad", "__dict__")
)


def tensors_of(leaves: Mapping[int, Leaves]) -> list[torch.Tensor]:
    """The leaves of all arguments."""
    return [leaf for argument in leaves.values() for leaf in argument.leaves if leaf is not None]


class Arrivals:
    """Notes in the gradient function whether the next backward pass reaches a leaf. Made before
    the loss is called.
    """

    def __init__(self, gradient: GradientFunction):
        self.gradient, self.evaluations = gradient, evaluations()
        self.hooks: list[tuple[torch.Tensor, RemovableHandle]] = []

    def watch(self, leaves: Sequence[torch.Tensor]) -> None:
        """Puts hooks on the leaves."""
        note = lambda _: self.gradient.reached.add(True)
        for leaf in leaves:
            self.hooks.append((leaf, leaf.register_hook(note)))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Takes the hooks away again. They may be on the parameters of a module."""
        for leaf, hook in self.hooks:
            _private.remove_hook(leaf, hook)

    def are_missed(self, loss: torch.Tensor, weight: Scalar, alone: bool) -> bool:
        """Whether a loss that reached no leaf is an error: it has a graph, or is a constant that
        nothing explains.

        Three things explain a constant: it is 0, as where all is masked; it has another gradient
        inside, such as that of a linear function; or other replicas have more micro-batches, so
        that this one is not `alone`.
        """
        self.end()
        if self.gradient.reached or not self.hooks or not float(weight):
            return False
        return loss.requires_grad or (
            alone and evaluations() == self.evaluations and is_constant(loss)
        )


def detached(tree: Tree, recorded: bool = False) -> Tree:
    """The tree without the graphs of its tensors.

    `recorded`: autograd will record them, outside of every transform. Tensors made in inference
    mode are copied then.
    """
    if not recorded and arrays.in_transform():
        return tree
    leaves, structure = trees.flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(leaf.requires_grad or (recorded and leaf.is_inference()) for leaf in tensors):
        return tree
    return trees.unflatten(structure, [_without_graph(leaf, recorded) for leaf in leaves])


def _without_graph(leaf: Any, recorded: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if recorded and leaf.is_inference():
        with torch.inference_mode(False):
            return leaf.clone()
    return leaf.detach() if leaf.requires_grad else leaf
