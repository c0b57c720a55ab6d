"""From what torch.export traced to a graph in single assignment.

In-place ops become their pure twins. A value that was written through a view is rebuilt from the written part
(``select_scatter`` and its kin), and views of it are taken anew when they are read next. Sections without gradients
read detached values. Sizes are written as functions of the batch. What is left over and unused is dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from squall.errors import ModelError, users_line
from squall.model.graph import Extent, Graph, Named, Node, Ref, Source, Value, refs_in
from squall.model.opaque import TARGET, OpaqueCall
from squall.model.sizes import extent_of
from squall.model.twins import is_in_place, pure_twin, unwrite

PREFIX = "model"
"""Under which name the exported wrapper holds the model."""


class Offence(Exception):
    """Something that cannot be a graph; the module that did it can be made opaque."""

    def __init__(self, *, module: str, reason: str, line: str) -> None:
        self.module, self.reason, self.line = module, reason, line
        super().__init__(reason)


@dataclass(slots=True)
class Storage:
    """Memory that several traced tensors share: how often it was written, and why it can be read no more."""

    version: int = 0
    broken: str = ""


@dataclass(slots=True)
class Traced:
    """A traced tensor: the value that it has now, and how to see it again after a write through another.

    Attributes:
        value: index of its value as of `version` of the storage.
        source: what it is a view of; None for one that owns its memory.
        view: the op that views it, and which of its outputs this is.
    """

    value: int
    storage: Storage
    version: int
    source: "Traced | None" = None
    view: "tuple[Call, int] | None" = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call with traced arguments, to be made again."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


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
            args, kwargs = _map(self._without_grad, args), _map(self._without_grad, kwargs)
        results, grads = self._run(op, args, kwargs, known)
        for at in unused:
            results[at] = None
        return self._append(str(op), args, kwargs, results, grads, _is_random(op, args, kwargs))

    def emit_opaque(self, call: OpaqueCall, args: tuple[Any, ...], results: list[Tensor]) -> list[int | None]:
        """Append a call of an opaque module, whose results without values are known."""
        if not self.grad:
            args = _map(self._without_grad, args)
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
        key = (op, repr(_map(self._grad_of, (args, kwargs))))
        if known is None or key not in self._grads:
            with self._mode, torch.enable_grad():
                result = op(*_map(self._fake, args), **_map(self._fake, kwargs))
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
                args=_map(self.constant, args),
                kwargs=_map(self.constant, kwargs),
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


@dataclass(slots=True)
class Lowering:
    """Walks a traced program and builds the graph.

    Attributes:
        program: what torch.export gave for a wrapper that holds the model as `PREFIX`.
        model: the stand-in that was traced, for the names of its tensors.
        calls: the opaque calls, by key.
        input_names: of the tensors in the call, in order.
        assigned: buffers that were set anew, whose values are the last outputs.
        constants: afterwards, the tensors that are neither parameters nor buffers, by name.
    """

    program: ExportedProgram
    model: nn.Module
    calls: Mapping[str, OpaqueCall]
    builder: Builder
    input_names: Sequence[str]
    assigned: Sequence[str] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)
    _env: dict[FxNode, Any] = field(default_factory=dict)
    _storages: dict[int, Storage] = field(default_factory=dict)
    _named: dict[str, Traced] = field(default_factory=dict)
    _outside: list[Traced] = field(default_factory=list)

    def run(self, *, training: bool, notes: tuple[str, ...]) -> Graph:
        self._bind_inputs()
        self._walk(self.program.graph_module)
        results = next(node for node in self.program.graph.nodes if node.op == "output").args[0]
        specs = self.program.graph_signature.output_specs
        outputs = tuple(
            self._output(result)
            for result, spec in zip(results, specs, strict=True)
            if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
        )
        kept = len(outputs) - len(self.assigned)
        mutations = dict(self._mutations())
        mutations.update(zip(self.assigned, (ref.index for ref in outputs[kept:]), strict=True))
        graph = Graph(
            values=tuple(self.builder.values),
            nodes=tuple(self.builder.nodes),
            outputs=outputs[:kept],
            mutations=tuple(mutations.items()),
            training=training,
            notes=notes,
        )
        return without_dead(graph)

    # Inputs: parameters and buffers once each, by object.

    def _bind_inputs(self) -> None:
        placeholders = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        specs = self.program.graph_signature.input_specs
        by_target = {spec.target: placeholders[spec.arg.name] for spec in specs if spec.target}
        for source, named in (
            (Source.PARAMETER, self.model.named_parameters(remove_duplicate=False)),
            (Source.BUFFER, self.model.named_buffers(remove_duplicate=False)),
        ):
            self._bind_tensors(source, list(named), by_target)
        inputs = iter(self.input_names)
        for spec in specs:
            node = placeholders[spec.arg.name]
            if spec.kind is InputKind.CONSTANT_TENSOR:
                self._bind_constant(spec.target or "", node)
            elif spec.kind is InputKind.USER_INPUT and isinstance(node.meta["val"], Tensor):
                self._new(node, self.builder.outside(next(inputs), Source.INPUT, node.meta["val"]))
            elif spec.kind is not InputKind.USER_INPUT and node not in self._env:
                raise ModelError(
                    subject=f"model {type(self.model).__name__}",
                    expected="parameters, buffers and tensors",
                    got=f"{spec.target!r}, a {spec.kind.name.lower()}",
                    remedy="Keep such objects out of forward, or make the module opaque.",
                )

    def _bind_tensors(
        self, source: Source, named: list[tuple[str, Tensor]], by_target: Mapping[str, FxNode]
    ) -> None:
        names: dict[int, list[str]] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
        for (first, *others), tensor in ((names[id(t)], t) for t in {id(t): t for _, t in named}.values()):
            nodes = [by_target[f"{PREFIX}.{n}"] for n in (first, *others) if f"{PREFIX}.{n}" in by_target]
            if not nodes:  # a buffer that export does not see: nothing reads it
                continue
            fake, grad = nodes[0].meta["val"], tensor.requires_grad
            traced = self._new(nodes[0], self.builder.outside(first, source, fake, tuple(others), grad))
            for other in nodes[1:]:
                self._env[other] = traced
                self._storages[_storage_of(other.meta["val"])] = traced.storage
            self._named[first] = traced

    def _bind_constant(self, target: str, node: FxNode) -> None:
        name = target.removeprefix(f"{PREFIX}.")
        tensor = self.program.constants[target]
        assert isinstance(tensor, Tensor)
        if tensor.is_meta:
            raise ModelError(
                subject=f"tensor {name!r} of a model on the meta device",
                expected="values",
                got="none: it is made on that device",
                remedy="Give its device explicitly, or register it as a buffer, or build the model in memory.",
            )
        self.constants[name] = tensor
        self._new(node, self.builder.outside(name, Source.CONSTANT, node.meta["val"]))

    def _new(self, node: FxNode, value: int) -> Traced:
        storage = self._storages.setdefault(_storage_of(node.meta["val"]), Storage())
        traced = Traced(value, storage, storage.version)
        self._env[node] = traced
        self._outside.append(traced)
        return traced

    # Nodes.

    def _walk(self, module: GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._locate(node)
                self._call(module, node)

    def _locate(self, node: FxNode) -> None:
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        if stack:
            module = stack[-1].removeprefix("L['self'].").split("@")[0]
            self.builder.place.module = module.removeprefix(PREFIX).removeprefix(".")
        if node.meta.get("stack_trace"):
            self.builder.place.line = users_line(node.meta["stack_trace"])

    def _call(self, module: GraphModule, node: FxNode) -> None:
        value, target = node.meta.get("val"), str(node.target)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._section(module, node)
        elif node.target is torch.ops.squall.opaque.default:
            self._opaque_call(node)
        elif target.endswith("getitem>") or target == "<built-in function getitem>":
            self._env[node] = self._env[node.args[0]][node.args[1]] if node.args[0] in self._env else None
        elif not _has_tensor(value):
            self._env[node] = value  # a size, an assertion about sizes: written as numbers where they are used
        elif not isinstance(node.target, torch._ops.OpOverload):
            raise self._offence(f"it calls {target}, which is no op of torch")
        elif node.target is torch.ops.aten.lift_fresh_copy.default:
            source = self._env[node.args[0]]
            self._env[node] = self._fresh(node.meta["val"], self._read(source))
        elif node.target is torch.ops.aten.batch_norm.default and node.args[5] and node.args[3] is not None:
            self._batch_norm(node)
        elif node.target is torch.ops.aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise self._offence("instance norm keeps running statistics")
        elif is_in_place(node.target):
            self._in_place(node)
        else:
            self._pure(node)

    def _pure(self, node: FxNode) -> None:
        call = Call(node.target, self._traced(node.args), self._traced(node.kwargs))
        self._see(node, call)

    def _see(self, node: FxNode, call: Call) -> None:
        if self._is_identity(call):
            self._env[node] = call.args[0]
            return
        value = node.meta["val"]
        made = self._make(call, [value] if isinstance(value, Tensor) else value)
        if isinstance(value, Tensor):
            self._env[node] = self._enter(value, made[0], call, 0)
        else:
            self._env[node] = [
                self._enter(fake, index, call, at) if isinstance(fake, Tensor) else None
                for at, (fake, index) in enumerate(zip(value, made, strict=True))
            ]

    def _is_identity(self, call: Call) -> bool:
        """Whether an op gives its first argument back: a slice of everything, dropout in evaluation."""
        aten = torch.ops.aten
        if call.op is aten.slice.Tensor and len(call.args) > 3:
            return tuple(call.args[2:4]) == (0, _END) and call.args[4:] in ((), (1,))
        if call.op is aten.detach.default:
            return not self.builder.values[self._read(call.args[0])].requires_grad
        return call.op is aten.dropout.default and (call.args[2] is False or call.args[1] == 0)

    def _make(self, call: Call, known: Sequence[Any] | None = None) -> list[Any]:
        args, kwargs = _map(self._ref, call.args), _map(self._ref, call.kwargs)
        return self.builder.emit(call.op, *args, known=known, **kwargs)

    def _enter(self, fake: Tensor, value: int | None, call: Call, at: int) -> Traced:
        """A new traced tensor, a view if it lies in the memory of an argument."""
        assert value is not None
        storage = self._storages.get(_storage_of(fake))
        if storage is None:
            return self._fresh(fake, value)
        for leaf in _leaves((call.args, call.kwargs)):
            if isinstance(leaf, Traced) and leaf.storage is storage:
                return Traced(value, storage, storage.version, leaf, (call, at))
        return Traced(value, storage, storage.version)

    def _fresh(self, fake: Tensor, value: int) -> Traced:
        storage = self._storages[_storage_of(fake)] = Storage()
        return Traced(value, storage, 0)

    def _read(self, traced: Traced) -> int:
        """The value that a traced tensor has now."""
        storage = traced.storage
        if traced.version != storage.version:
            if storage.broken or traced.source is None or traced.view is None:
                raise self._offence(storage.broken or "it writes in place to memory that is read in another way")
            self._read(traced.source)
            call, at = traced.view
            value = self._make(call)[at]
            assert value is not None
            traced.value, traced.version = value, storage.version
        return traced.value

    def _write(self, traced: Traced, value: int) -> None:
        """Give a traced tensor a new value, and with it all that it is a view of."""
        above: list[tuple[Traced, Traced, int]] = []
        child = traced
        while child.source is not None:
            above.append((child, child.source, self._read(child.source)))
            child = child.source
        storage = traced.storage
        storage.version += 1
        traced.value, traced.version = value, storage.version
        for child, parent, old in above:
            assert child.view is not None
            call, at = child.view
            arguments = _map(self._old_ref(parent, old), call.args)
            made = unwrite(self.builder, call.op, arguments, dict(call.kwargs), at, old, child.value)
            if made is None:
                storage.broken = (
                    f"it writes in place through {call.op} to memory that is read again afterwards"
                )
                return
            parent.value, parent.version = made, storage.version

    def _old_ref(self, parent: Traced, old: int) -> Callable[[Any], Any]:
        def ref(leaf: Any) -> Any:
            if leaf is parent:
                return Ref(old)
            return Ref(leaf.value) if isinstance(leaf, Traced) else leaf

        return ref

    # Ops that need care.

    def _in_place(self, node: FxNode) -> None:
        call = Call(node.target, self._traced(node.args), self._traced(node.kwargs))
        twin = pure_twin(node.target, call.args, call.kwargs)
        if twin is None:
            raise self._offence(f"{node.target} has no twin that leaves its input alone")
        op, args, kwargs, written = twin
        if op not in _OF_SHAPE and not self.builder.grad and self.builder.values[self._read(written)].requires_grad:
            raise self._offence("it writes without gradients to a value that has one")
        if op in _OF_SHAPE:  # changes how one name sees the memory, not the memory
            self._see(node, Call(op, args, kwargs))
            return
        old = self._read(written)
        value = self._converted(op, _map(self._ref, args), _map(self._ref, kwargs), old)
        self._write(written, value)
        self._env[node] = written

    def _converted(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], old: int) -> int:
        """The twin's result with the dtype and shape of what it is written to."""
        was = self.builder.fakes[old]
        if op is torch.ops.aten.copy.default:
            value = args[1].index
        else:
            value = _one(self.builder.emit(op, *args, **kwargs))
        aten = torch.ops.aten
        if self.builder.fakes[value].dtype != was.dtype:
            value = _one(self.builder.emit(aten._to_copy.default, Ref(value), dtype=was.dtype))
        if self.builder.fakes[value].shape != was.shape:
            value = _one(self.builder.emit(aten.expand.default, Ref(value), list(was.shape)))
        return value

    def _batch_norm(self, node: FxNode) -> None:
        """Batch norm in training, with its new running statistics as outputs instead of a silent write."""
        traced = self._traced(node.args)
        mean, variance = traced[3], traced[4]
        args = _map(self._ref, traced[:8])
        made = self.builder.emit(
            torch.ops.aten._native_batch_norm_legit_functional.default, *args, unused=(1, 2)
        )
        assert made[0] is not None and made[3] is not None and made[4] is not None
        self._write(mean, made[3])
        self._write(variance, made[4])
        self._env[node] = self._fresh(node.meta["val"], made[0])

    def _opaque_call(self, node: FxNode) -> None:
        key, inputs = node.args
        assert isinstance(key, str)
        call = self.calls[key]
        prefix = f"{call.module}." if call.module else ""
        within = {name: tensor for name, tensor in self.model.get_submodule(call.module).named_parameters()}
        parameters = [self._tensor_named(prefix + name) for name in within]
        buffers = [self._tensor_named(prefix + name) for name in call.buffers]
        args = (
            key,
            tuple(Ref(self._read(traced)) for traced in self._traced(inputs)),
            tuple(Ref(self._read(traced)) for traced in parameters),
            tuple(Ref(self._read(traced)) for traced in buffers),
        )
        self.builder.place = Place(call.module, self.builder.place.line)
        fakes = [*node.meta["val"], *(self.builder.fakes[ref.index] for ref in args[3])]
        made = self.builder.emit_opaque(call, args, fakes)
        outputs = len(call.outputs)
        for traced, value in zip(buffers, made[outputs:], strict=True):
            assert value is not None
            self._write(traced, value)
        self._env[node] = [
            self._fresh(fake, _one([value]))
            for fake, value in zip(node.meta["val"], made[:outputs], strict=True)
        ]

    def _tensor_named(self, name: str) -> Traced:
        found = self._named.get(name)
        if found is not None:
            return found
        for first, traced in self._named.items():
            if name in self.builder.values[traced.value].aliases or first == name:
                return traced
        tensor = self._lookup(name)
        for first, traced in self._named.items():
            if self._lookup(first) is tensor:
                return traced
        raise KeyError(name)

    def _lookup(self, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        found: Tensor = getattr(self.model.get_submodule(path), last)
        return found

    def _section(self, module: GraphModule, node: FxNode) -> None:
        """A part under torch.no_grad or torch.enable_grad, written out in line."""
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            name = str(node.target).rsplit(".", 1)[-1]
            name = "torch.autocast" if name == "wrap_with_autocast" else name
            raise self._offence(f"it uses {name}")
        enabled, inner, *arguments = node.args
        section = getattr(module, str(inner.target))  # type: ignore[union-attr]
        places = [inside for inside in section.graph.nodes if inside.op == "placeholder"]
        for place, argument in zip(places, arguments, strict=True):
            traced = self._env.get(argument) if isinstance(argument, FxNode) else argument
            self._env[place] = traced
            if isinstance(traced, Traced) and isinstance(place.meta.get("val"), Tensor):
                self._storages[_storage_of(place.meta["val"])] = traced.storage
        was, self.builder.grad = self.builder.grad, bool(enabled)
        self._walk(section)
        self.builder.grad = was
        (results,) = next(inside for inside in section.graph.nodes if inside.op == "output").args
        results = results if isinstance(results, tuple | list) else (results,)
        self._env[node] = [self._env.get(r) if isinstance(r, FxNode) else r for r in results]

    # Arguments and results.

    def _traced(self, argument: Any) -> Any:
        """Arguments with each traced node replaced by its tensor or its size."""

        def lookup(leaf: Any) -> Any:
            if not isinstance(leaf, FxNode):
                return leaf
            found = self._env.get(leaf, leaf.meta.get("val"))
            return found if isinstance(found, Traced) else leaf.meta.get("val", found)

        return _map(lookup, argument)

    def _ref(self, leaf: Any) -> Any:
        return Ref(self._read(leaf)) if isinstance(leaf, Traced) else leaf

    def _output(self, result: Any) -> Any:
        if not isinstance(result, FxNode):
            return self.builder.constant(result)
        found = self._env.get(result)
        if isinstance(found, Traced):
            return Ref(self._read(found))
        return self.builder.constant(result.meta["val"])

    def _mutations(self) -> Iterator[tuple[str, int]]:
        for traced in self._outside:
            if traced.storage.version == 0:
                continue
            original = self._original(traced)
            if original is None or original.source is Source.INPUT:
                continue  # a minibatch is nobody's state: the pure twin leaves it as it was
            if original.source is Source.BUFFER:
                yield original.name, self._read(traced)
            elif original.source is Source.CONSTANT:
                owner, _, attribute = original.name.rpartition(".")
                raise Offence(
                    module=owner, reason=f"its forward writes to self.{attribute} in place", line=""
                )
            else:
                raise ModelError(
                    subject=f"parameter {original.name!r}",
                    expected="a forward that leaves parameters as they are",
                    got="one that writes to it in place",
                    remedy="Constrain parameters in forward (torch.nn.utils.parametrize), not by writing.",
                )

    def _original(self, traced: Traced) -> Value | None:
        at = self._outside.index(traced)
        return self.builder.values[at] if self.builder.values[at].source is not Source.NODE else None

    def _offence(self, reason: str) -> Offence:
        place = self.builder.place
        return Offence(module=place.module, reason=reason, line=place.line)


_END = 2**63 - 1
_OF_SHAPE = {
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.transpose.int,
    torch.ops.aten.t.default,
    torch.ops.aten.detach.default,
}


def without_dead(graph: Graph) -> Graph:
    """The graph without nodes whose results nobody reads; random ones stay, since they move the generator."""
    needed = {index for _, index in graph.mutations} | {ref.index for ref in refs_in(graph.outputs)}
    kept = []
    for node in reversed(graph.nodes):
        if node.is_random or needed.intersection(at for at in node.outputs if at is not None):
            kept.append(node)
            needed.update(node.inputs)
    made = {at for node in kept for at in node.outputs}
    live = [at for at, v in enumerate(graph.values) if v.source is not Source.NODE or at in made]
    new = {old: at for at, old in enumerate(live)}

    def moved(leaf: Any) -> Any:
        return Ref(new[leaf.index]) if isinstance(leaf, Ref) else leaf

    nodes = tuple(
        replace(
            node,
            args=_map(moved, node.args),
            kwargs=_map(moved, node.kwargs),
            outputs=tuple(None if at is None else new[at] for at in node.outputs),
        )
        for node in reversed(kept)
    )
    return replace(
        graph,
        values=tuple(graph.values[at] for at in live),
        nodes=nodes,
        outputs=_map(moved, graph.outputs),
        mutations=tuple((name, new[at]) for name, at in graph.mutations),
    )


def _map(function: Callable[[Any], Any], argument: Any) -> Any:
    """Like `graph.map_argument`, for traced arguments, whose lists become tuples."""
    if isinstance(argument, tuple | list):
        return tuple(_map(function, part) for part in argument)
    if isinstance(argument, Mapping):
        return {key: _map(function, part) for key, part in argument.items()}
    return function(argument)


def _leaves(argument: Any) -> Iterator[Any]:
    found: list[Any] = []
    _map(found.append, argument)
    yield from found


def _one(made: Sequence[int | None]) -> int:
    assert made[0] is not None
    return made[0]


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value)
    )


def _storage_of(fake: Tensor) -> int:
    return fake.untyped_storage()._cdata


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
