"""Any `nn.Module` as a graph of aten ops, in one mode, for batches of any size.

torch.export traces it (non-strict, nothing decomposed) with the batch size left open. Before that, an example run
shows what a trace would lose; those modules are kept whole (`opaque`). After it, the graph is held against the model
itself: outputs, buffers and gradients on the example, outputs on a single example and on twice as many.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from traceback import format_tb
from typing import Any

import torch
from torch import Tensor, nn

from squall.errors import ConfigError, ModelError, users_line
from squall.model.builder import Builder
from squall.model.captured import Captured
from squall.model.check import compare, is_bit_equal, outcome, seeded
from squall.model.lower import Lowering
from squall.model.memory import Offence
from squall.model.opaque import ALWAYS, Placeholders, Recorder, Shapes, is_marked
from squall.model.parameters import refuse_lazy
from squall.model.stand_in import calls_wrapped, is_on_meta, stand_in
from squall.model.structure import Structure, is_plain
from squall.model.trace import Untraceable, Wrapper, trace
from squall.model.watch import Watcher

_MAX_TRIES = 50


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = True,
    opaque: Sequence[str] = (),
    batch_dims: Sequence[int | None] | None = None,
) -> Captured:
    """Capture a model in one mode.

    The caller's module is not changed, nor are the random generators. A model on the meta device is captured without
    memory, and cannot be checked.

    Args:
        model: any module; it is put into the mode, on a copy.
        args, kwargs: an example call, of at least two examples; tensors in any nesting of tuples, lists, dicts and
            dataclasses.
        training: which mode.
        opaque: names or patterns of modules to keep whole, as in ``("*.lstm",)``.
        batch_dims: of each tensor in the call, in order, the dimension that counts examples, or None; by default 0
            for every tensor whose first size is that of the first one.

    Raises:
        ModelError: the model cannot be captured as it is, and where, and the way on.
        ConfigError: a pattern fits no module.

    >>> captured = capture(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), (torch.zeros(3, 4),))
    >>> print(captured.graph)
    %linear = aten.linear.default(args_0, 0.weight, 0.bias)
    %relu = aten.relu.default(%linear)
    return (%relu,)
    """
    refuse_lazy(model)
    return _Capture(model, (tuple(args), dict(kwargs or {})), training, batch_dims).run(opaque)


class _Capture:
    """One capture under way: the example, and which modules are opaque by now, and why."""

    def __init__(
        self, model: nn.Module, call: Any, training: bool, batch_dims: Sequence[int | None] | None
    ) -> None:
        self.model = model
        self.training = training
        self.is_meta = is_on_meta(model)
        self.tensors, self.arguments = Structure.of(call)
        self._refuse_strange_arguments()
        if self.is_meta:
            self.tensors = [tensor.to("meta") for tensor in self.tensors]
        self.dims, self.batch = _batch_of(self.tensors, batch_dims)
        self.twin = stand_in(model, training=training)
        self.opaque: dict[str, str] = {}
        self.device: AbstractContextManager[Any] = nullcontext()

    def run(self, patterns: Sequence[str]) -> Captured:
        self.opaque = _asked_for(self.twin, patterns)
        with seeded():
            for name, reason in self._seen_on_the_example().items():
                self._keep_whole(name, reason)
            for _ in range(_MAX_TRIES):
                captured = self._tried()
                if captured is not None:
                    break
            else:  # pragma: no cover  each try makes one more module opaque
                raise AssertionError("no end of modules to make opaque")
        if not self.is_meta:
            self._check(captured)
        return captured

    def _seen_on_the_example(self) -> dict[str, str]:
        """What an example run shows that a graph would lose, by module.

        The first run is not watched: what a module keeps from its first forward on is no change.
        """
        try:
            self._first_forward()
        except Exception as error:
            raise ModelError(
                subject=f"model {type(self.model).__name__}",
                expected="a forward that runs on the example",
                got=f"{type(error).__name__}: {error} "
                f"({users_line(''.join(format_tb(error.__traceback__)))})",
            ) from error
        watcher = Watcher(self.twin)
        watcher.start()
        with calls_wrapped(self.twin, watcher.wrap):
            self._forward(self.twin, self.tensors)
        watcher.finish()
        self._refuse_written_parameters()
        return watcher.reasons

    def _first_forward(self) -> None:
        if self.is_meta:
            try:
                self._forward(self.twin, self.tensors)
                return
            except RuntimeError:  # it makes tensors of its own: let them be on the meta device, too
                self.device = torch.device("meta")
        self._forward(self.twin, self.tensors)

    def _refuse_written_parameters(self) -> None:
        mine = dict(self.model.named_parameters())
        for name, parameter in self.twin.named_parameters():
            if parameter._version or not (self.is_meta or is_bit_equal(parameter, mine[name])):
                raise ModelError(
                    subject=f"parameter {name!r}",
                    expected="a forward that leaves parameters as they are, since shards own them",
                    got="one that writes to it",
                    remedy="Constrain it in forward instead, as torch.nn.utils.parametrize does.",
                )

    def _forward(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = self.arguments.build([tensor.detach().clone() for tensor in tensors])
        with self.device, torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            return model(*args, **kwargs)

    def _tried(self) -> Captured | None:
        """The captured model; None if one more module had to be made opaque."""
        shapes = self._opaque_shapes()
        wrapper = Wrapper(self.twin, self.arguments)
        try:
            with self.device:
                program, symbol = trace(wrapper, self.tensors, self.dims, Placeholders(shapes))
        except Untraceable as untraceable:
            self._keep_whole_if_possible(untraceable)
            return None
        calls = {key: shape.first for key, shape in shapes.items()}
        first = next(iter(program.graph.nodes)).meta["val"]
        builder = Builder(first.fake_mode, symbol)
        lowering = Lowering(program, self.twin, calls, builder, self._input_names(), wrapper.assigned)
        try:
            graph = lowering.run(training=self.training, notes=self._notes())
        except Offence as offence:
            self._keep_whole(offence.module, offence.reason, offence.line)
            return None
        return Captured(
            graph=graph,
            arguments=self.arguments,
            result=wrapper.result,
            batch_dims=self.dims,
            constants=lowering.constants,
            opaques=calls,
        )

    def _opaque_shapes(self) -> dict[str, Shapes]:
        """The opaque calls of one forward, at two batch sizes."""
        if not self.opaque:
            return {}
        outermost = [name for name in self.opaque if not _is_within(name, self.opaque)]
        runs = []
        for times in (1, 2):
            recorder = Recorder(outermost)
            with calls_wrapped(self.twin, recorder.wrap):
                self._forward(self.twin, self._resized(times * self.batch))
            runs.append(recorder.calls)
        batches = (self.batch, 2 * self.batch)
        return {one.key: Shapes(batches, one, two) for one, two in zip(runs[0], runs[1], strict=True)}

    def _resized(self, batch: int) -> list[Tensor]:
        """The example with another number of examples: some of it, or some of it again."""
        made = []
        for tensor, dim in zip(self.tensors, self.dims, strict=True):
            if dim is None:
                made.append(tensor)
                continue
            times = -(-batch // self.batch)
            made.append(torch.cat([tensor] * times, dim).narrow(dim, 0, batch))
        return made

    # What is kept whole.

    def _keep_whole(self, name: str, reason: str, line: str = "") -> None:
        if _is_within(name, self.opaque):
            return
        if name in self.opaque or name == "":
            raise ModelError(
                subject=f"module {name!r}" if name else f"model {type(self.model).__name__}",
                expected="a forward whose every step can be seen as an op of torch",
                got=f"one that cannot: {reason}" + (f" ({line})" if line else ""),
                remedy="Move that step into a module of its own, which is then kept whole.",
            )
        self.opaque[name] = reason

    def _keep_whole_if_possible(self, untraceable: Untraceable) -> None:
        """torch's own modules are kept whole without asking; of the user's, the user decides."""
        name = untraceable.module
        module = self.twin.get_submodule(name) if name else self.twin
        if name and type(module).__module__.startswith("torch.") and not _is_within(name, self.opaque):
            self._keep_whole(name, untraceable.reason)
            return
        raise untraceable.error()

    def _notes(self) -> tuple[str, ...]:
        return tuple(
            f"module {name!r} is kept whole: {reason}"
            for name, reason in sorted(self.opaque.items())
            if not _is_within(name, self.opaque)
        ) + (("the model is on the meta device, so its graph was not checked",) if self.is_meta else ())

    def _input_names(self) -> list[str]:
        paths = list(self.arguments.leaf_paths())
        return [_input_name(path) for path in paths]

    def _refuse_strange_arguments(self) -> None:
        for path, constant in self.arguments.constants():
            if not is_plain(constant):
                raise ModelError(
                    subject=f"argument {_input_name(path)}",
                    expected="tensors, plain constants, and tuples, lists, dicts and dataclasses of them",
                    got=f"a {type(constant).__name__}",
                    remedy="Pass the tensors that it holds.",
                )

    # The graph held against the model.

    def _check(self, captured: Captured) -> None:
        self._check_at(captured, self.batch, with_gradients=True)
        if any(dim is not None for dim in self.dims):
            for batch in (1, 2 * self.batch):
                self._check_at(captured, batch, with_gradients=False)

    def _check_at(self, captured: Captured, batch: int, *, with_gradients: bool) -> None:
        tensors = self._resized(batch)
        theirs, ours = (stand_in(self.model, training=self.training) for _ in range(2))
        outcomes = []
        for model, call in ((theirs, None), (ours, captured.bind(ours))):
            try:
                outcomes.append(self._outcome(captured, model, call, tensors, with_gradients))
            except Exception:
                if model is theirs and batch != self.batch:
                    return  # the model itself does not take so many
                raise
        compare(captured.graph, outcomes[1], outcomes[0], batch=batch, model=self.model)

    def _outcome(
        self,
        captured: Captured,
        model: nn.Module,
        call: Callable[..., Any] | None,
        tensors: Sequence[Tensor],
        with_gradients: bool,
    ) -> Any:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with seeded(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            args, kwargs = self.arguments.build([tensor.detach().clone() for tensor in tensors])
            result = (call or model)(*args, **kwargs)
            leaves, form = Structure.of(result)
            leaves += [constant for _, constant in form.constants() if is_plain(constant)]
            buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
            return outcome(leaves, trained if with_gradients else {}, buffers)


def _is_within(name: str, others: Mapping[str, str]) -> bool:
    """Whether a module lies inside another of these."""
    return any(other != name and (other == "" or name.startswith(f"{other}.")) for other in others)


def _asked_for(model: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """The modules that are opaque from the start, and why."""
    found = {}
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                subject=f"opaque=: {pattern!r}",
                expected="a pattern that fits a module of the model",
                got="one that fits none",
                remedy=f"Its modules are {', '.join(name for name in names if name) or 'none'}.",
            )
    for name, module in model.named_modules():
        if is_marked(module) or any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = "as asked for"
        elif isinstance(module, ALWAYS):
            found[name] = f"{type(module).__name__} is one call of torch"
    return found


def _batch_of(
    tensors: Sequence[Tensor], given: Sequence[int | None] | None
) -> tuple[tuple[int | None, ...], int]:
    """Of each tensor the dimension of examples, and how many examples there are."""
    if given is not None:
        if len(given) != len(tensors):
            raise ModelError(
                subject="batch_dims",
                expected=f"one for each of the {len(tensors)} tensors of the example call",
                got=f"{len(given)}",
            )
        dims = tuple(given)
    else:
        first = next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)
        dims = tuple(0 if t.dim() and t.shape[0] == first else None for t in tensors)
    sizes = {t.shape[dim] for t, dim in zip(tensors, dims, strict=True) if dim is not None}
    if len(sizes) > 1 or min(sizes, default=2) < 2:
        raise ModelError(
            subject="the example call",
            expected="at least two examples, as many in every tensor",
            got=f"{', '.join(map(str, sorted(sizes)))}",
            remedy="Pass a minibatch of two or more; say with batch_dims where other tensors count examples.",
        )
    return dims, next(iter(sizes), 1)


def _input_name(path: str) -> str:
    """A readable name for a tensor of ``(args, kwargs)``, as in ``args_0`` or ``x['u']``."""
    where, rest = path[1], path[3:]
    if where == "0":
        number, _, more = rest.removeprefix("[").partition("]")
        return f"args_{number}{more}"
    key, _, more = rest.removeprefix("[").partition("]")
    return f"{key.strip(chr(39))}{more}"
