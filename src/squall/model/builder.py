"""A graph under construction: nodes and values are appended, and told their shapes by torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from squall.errors import ModelError
from squall.model.graph import Named, Node, Ref, Source, Value, refs_in
from squall.model.opaque import TARGET, OpaqueCall
from squall.model.sizes import extent_of


@dataclass(slots=True)
class Place:
    """Where in the user's code the nodes made now come from."""

    module: str = ""
    line: str = ""


class Builder:
    """Appends nodes and values; shapes and dtypes come from running each op without values."""

    def __init__(self, fake_mode: Any, symbol: Any) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.fakes: list[Tensor] = []
        self.place = Place()
        self.grad = True
        self._mode = fake_mode
        self._symbol = symbol
        self._detached: dict[int, int] = {}
        self._grads: dict[Any, list[bool]] = {}
        self._names: dict[str, int] = {}

    def outside(
        self,
        name: str,
        source: Source,
        fake: Tensor,
        aliases: tuple[str, ...] = (),
        requires_grad: bool = False,
    ) -> int:
        """A value that comes from outside."""
        self.fakes.append(fake.detach())
        self.values.append(
            Value(
                name=name,
                source=source,
                aliases=aliases,
                shape=self.sizes(fake.shape),
                dtype=_dtype(fake),
                requires_grad=requires_grad,
            )
        )
        return len(self.values) - 1

    def emit(
        self,
        op: Any,
        *args: Any,
        unused: tuple[int, ...] = (),
        known: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[int | None]:
        """Append a call of an op; `Ref` stands for a value. Without gradients, its inputs are detached first.

        Args:
            unused: positions of outputs that are not kept as values.
            known: its results without values, if they are known.
        """
        if not self.grad:
            args, kwargs = map_traced(self._without_grad, args), map_traced(self._without_grad, kwargs)
        results, grads = self._run(op, args, kwargs, known)
        for at in unused:
            results[at] = None
        return self._append(str(op), args, kwargs, results, grads, _is_random(op, args, kwargs))

    def emit_opaque(self, call: OpaqueCall, args: tuple[Any, ...], results: list[Tensor]) -> list[int | None]:
        """Append a call of an opaque module, whose results without values are known."""
        if not self.grad:
            args = map_traced(self._without_grad, args)
        grad = any(self.values[ref.index].requires_grad for ref in refs_in(args))
        grads = [
            grad and at < len(call.outputs) and fake.is_floating_point() for at, fake in enumerate(results)
        ]
        return self._append(TARGET, args, {}, results, grads, call.is_random)

    def sizes(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self.constant(size) for size in shape)

    def constant(self, leaf: Any) -> Any:
        """A traced constant as the graph has it."""
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._extent(leaf)
        if isinstance(leaf, torch.dtype):
            return Named("dtype", str(leaf).removeprefix("torch."))
        if isinstance(leaf, torch.layout):
            return Named("layout", str(leaf).removeprefix("torch."))
        if isinstance(leaf, torch.memory_format):
            return Named("memory_format", str(leaf).removeprefix("torch."))
        if isinstance(leaf, torch.device):
            return Named("device", "cpu" if leaf.type == "meta" else str(leaf))
        return leaf

    def _extent(self, number: Any) -> Any:
        found = extent_of(number, self._symbol)
        if found is None:
            raise ModelError(
                subject=f"module {self.place.module!r} ({self.place.line or 'no line is known'})",
                expected="sizes that follow from the batch size alone",
                got=f"{number}, which depends on values" if "u" in str(number) else f"the size {number}",
                remedy="Use torch.where or a mask instead of picking elements, or keep the module whole: "
                f"opaque=({self.place.module or '<name>'!r},) or squall.opaque(module).",
            )
        return found

    def _without_grad(self, leaf: Any) -> Any:
        if not isinstance(leaf, Ref) or not self.values[leaf.index].requires_grad:
            return leaf
        if leaf.index not in self._detached:
            fake = self.fakes[leaf.index]
            made = self._append("aten.detach.default", (leaf,), {}, [fake], [False], False)[0]
            assert made is not None
            self._detached[leaf.index] = made
        return Ref(self._detached[leaf.index])

    def _run(
        self, op: Any, args: Any, kwargs: Any, known: Sequence[Any] | None
    ) -> tuple[list[Any], list[bool]]:
        """An op's results without values, and which of them have a gradient.

        An op that was run before on arguments with and without gradients at the same places need not run again.
        """
        key = (op, repr(map_traced(self._grad_of, (args, kwargs))))
        if known is None or key not in self._grads:
            # Some kernels ask for sizes as numbers, which would fix the batch size for all that follows.
            with self._mode, self._mode.shape_env.suppress_guards(), torch.enable_grad():
                result = op(*map_traced(self._fake, args), **map_traced(self._fake, kwargs))
            results = list(result) if isinstance(result, tuple | list) else [result]
            self._grads[key] = [isinstance(r, Tensor) and r.requires_grad for r in results]
            known = known or [r.detach() if isinstance(r, Tensor) else r for r in results]
        return list(known), self._grads[key]

    def _grad_of(self, leaf: Any) -> Any:
        """What of an argument can decide whether a result has a gradient."""
        if isinstance(leaf, Ref):
            return self.values[leaf.index].requires_grad, self.values[leaf.index].dtype
        return leaf if isinstance(leaf, torch.dtype | bool) else None

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        fake = self.fakes[leaf.index]
        return fake.detach().requires_grad_() if self.values[leaf.index].requires_grad else fake

    def _append(
        self,
        target: str,
        args: Any,
        kwargs: Any,
        results: Sequence[Any],
        grads: Sequence[bool],
        is_random: bool,
    ) -> list[Any]:
        name = self._name(target)
        outputs: list[int | None] = []
        for at, fake in enumerate(results):
            if not isinstance(fake, Tensor):
                outputs.append(None)
                continue
            outputs.append(len(self.values))
            self.fakes.append(fake)
            self.values.append(
                Value(
                    name=name if len(results) == 1 else f"{name}.{at}",
                    source=Source.NODE,
                    shape=self.sizes(fake.shape),
                    dtype=_dtype(fake),
                    requires_grad=grads[at],
                )
            )
        self.nodes.append(
            Node(
                target=target,
                args=map_traced(self.constant, args),
                kwargs=map_traced(self.constant, kwargs),
                outputs=tuple(outputs),
                name=name,
                module=self.place.module,
                line=self.place.line,
                is_random=is_random,
            )
        )
        return outputs

    def _name(self, target: str) -> str:
        base = target.split(".")[1]
        count = self._names.get(base, 0)
        self._names[base] = count + 1
        return f"%{base}_{count}" if count else f"%{base}"


def map_traced(function: Callable[[Any], Any], argument: Any) -> Any:
    """Like `graph.map_argument`, for traced arguments, whose lists become tuples."""
    if isinstance(argument, tuple | list):
        return tuple(map_traced(function, part) for part in argument)
    if isinstance(argument, Mapping):
        return {key: map_traced(function, part) for key, part in argument.items()}
    return function(argument)


def only(made: Sequence[int | None]) -> int:
    assert made[0] is not None
    return made[0]


def _dtype(fake: Tensor) -> str:
    return str(fake.dtype).removeprefix("torch.")


def _is_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws: its op may, and its arguments do not say that it does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | dict(kwargs)
    if given.get("train", given.get("training", True)) is False:
        return False
    chance = given.get("dropout_p", given.get("p", given.get("dropout", None)))
    if "dropout_p" in {argument.name for argument in op._schema.arguments} and chance is None:
        return False
    return not (chance in (0, 0.0) and "dropout" in str(op) + " ".join(given))
