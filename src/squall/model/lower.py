"""From what torch.export traced to a graph in single assignment.

In-place ops become their pure twins. A value that was written through a view is rebuilt from the written part
(``select_scatter`` and its kin), and views of it are taken anew when they are read next. Sections without gradients
read detached values. Sizes are written as functions of the batch. What is left over and unused is dropped.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from squall.errors import ModelError, users_line
from squall.model.builder import Builder, Place, map_traced, only
from squall.model.graph import Graph, Ref, Source, Value, without_dead
from squall.model.memory import Call, Memory, Offence, Traced
from squall.model.opaque import OpaqueCall
from squall.model.twins import is_in_place, pure_twin

PREFIX = "model"
"""Under which name the exported wrapper holds the model."""


@dataclass
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
    _named: dict[str, Traced] = field(default_factory=dict)
    _outside: list[Traced] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._memory = Memory(self.builder)

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
                self._memory.join(other.meta["val"], traced)
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
        traced = self._env[node] = self._memory.outside(node.meta["val"], value)
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
        elif node.target is operator.getitem:
            self._item(node)
        elif not _has_tensor(value):
            self._env[node] = value  # a size, or a claim about sizes: numbers where they are used
        elif not isinstance(node.target, torch._ops.OpOverload):
            raise self._memory.offence(f"it calls {target}, which is no op of torch")
        elif node.target is torch.ops.aten.lift_fresh_copy.default:
            source = self._traced(node.args)[0]
            self._env[node] = self._memory.fresh(node.meta["val"], self._memory.read(source))
        elif node.target is torch.ops.aten.batch_norm.default and node.args[5] and node.args[3] is not None:
            self._batch_norm(node)
        elif (
            node.target is torch.ops.aten.instance_norm.default and node.args[3] is not None and node.args[5]
        ):
            raise self._memory.offence("instance norm keeps running statistics")
        elif is_in_place(node.target):
            self._in_place(node)
        else:
            self._pure(node)

    def _item(self, node: FxNode) -> None:
        parts, at = node.args
        found = self._env.get(parts) if isinstance(parts, FxNode) else None
        assert isinstance(at, int)
        self._env[node] = found[at] if isinstance(found, list) else node.meta.get("val")

    def _pure(self, node: FxNode) -> None:
        call = Call(node.target, self._traced(node.args), self._traced(node.kwargs))
        self._see(node, call)

    def _see(self, node: FxNode, call: Call) -> None:
        if self._is_identity(call):
            self._env[node] = call.args[0]
            return
        value = node.meta["val"]
        made = self._memory.make(call, [value] if isinstance(value, Tensor) else value)
        if isinstance(value, Tensor):
            self._env[node] = self._memory.enter(value, made[0], call, 0)
        else:
            self._env[node] = [
                self._memory.enter(fake, index, call, at) if isinstance(fake, Tensor) else None
                for at, (fake, index) in enumerate(zip(value, made, strict=True))
            ]

    def _is_identity(self, call: Call) -> bool:
        """Whether an op gives its first argument back: a slice of everything, dropout in evaluation."""
        aten = torch.ops.aten
        if call.op is aten.slice.Tensor and len(call.args) > 3:
            return tuple(call.args[2:4]) == (0, _END) and call.args[4:] in ((), (1,))
        if call.op is aten.detach.default:
            return not self.builder.values[self._memory.read(call.args[0])].requires_grad
        return call.op is aten.dropout.default and (call.args[2] is False or call.args[1] == 0)

    # Ops that need care.

    def _in_place(self, node: FxNode) -> None:
        call = Call(node.target, self._traced(node.args), self._traced(node.kwargs))
        twin = pure_twin(node.target, call.args, call.kwargs)
        if twin is None:
            raise self._memory.offence(f"{node.target} has no twin that leaves its input alone")
        op, args, kwargs, written = twin
        if (
            op not in _OF_SHAPE
            and not self.builder.grad
            and self.builder.values[self._memory.read(written)].requires_grad
        ):
            raise self._memory.offence("it writes without gradients to a value that has one")
        if op in _OF_SHAPE:  # changes how one name sees the memory, not the memory
            self._see(node, Call(op, args, kwargs))
            return
        old = self._memory.read(written)
        value = self._converted(
            op, map_traced(self._memory.ref, args), map_traced(self._memory.ref, kwargs), old
        )
        self._memory.write(written, value)
        self._env[node] = written

    def _converted(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], old: int) -> int:
        """The twin's result with the dtype and shape of what it is written to."""
        was = self.builder.fakes[old]
        if op is torch.ops.aten.copy.default:
            source: Ref = args[1]
            value = source.index
        else:
            value = only(self.builder.emit(op, *args, **kwargs))
        aten = torch.ops.aten
        if self.builder.fakes[value].dtype != was.dtype:
            value = only(self.builder.emit(aten._to_copy.default, Ref(value), dtype=was.dtype))
        if self.builder.fakes[value].shape != was.shape:
            value = only(self.builder.emit(aten.expand.default, Ref(value), list(was.shape)))
        return value

    def _batch_norm(self, node: FxNode) -> None:
        """Batch norm in training, with its new running statistics as outputs instead of a silent write."""
        traced = self._traced(node.args)
        mean, variance = traced[3], traced[4]
        args = map_traced(self._memory.ref, traced[:8])
        made = self.builder.emit(
            torch.ops.aten._native_batch_norm_legit_functional.default, *args, unused=(1, 2)
        )
        self._memory.write(mean, only(made[3:4]))
        self._memory.write(variance, only(made[4:5]))
        self._env[node] = self._memory.fresh(node.meta["val"], only(made))

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
            tuple(Ref(self._memory.read(traced)) for traced in self._traced(inputs)),
            tuple(Ref(self._memory.read(traced)) for traced in parameters),
            tuple(Ref(self._memory.read(traced)) for traced in buffers),
        )
        self.builder.place = Place(call.module, self.builder.place.line)
        fakes = [*node.meta["val"], *(self.builder.fakes[ref.index] for ref in args[3])]
        made = self.builder.emit_opaque(call, args, fakes)
        outputs = len(call.outputs)
        for traced, value in zip(buffers, made[outputs:], strict=True):
            assert value is not None
            self._memory.write(traced, value)
        self._env[node] = [
            self._memory.fresh(fake, only([value]))
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
            raise self._memory.offence(f"it uses {name}")
        enabled, inner, *arguments = node.args
        section = getattr(module, str(inner.target))  # type: ignore[union-attr]
        places = [inside for inside in section.graph.nodes if inside.op == "placeholder"]
        for place, argument in zip(places, arguments, strict=True):
            traced = self._env.get(argument) if isinstance(argument, FxNode) else argument
            self._env[place] = traced
            if isinstance(traced, Traced) and isinstance(place.meta.get("val"), Tensor):
                self._memory.join(place.meta["val"], traced)
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

        return map_traced(lookup, argument)

    def _output(self, result: Any) -> Any:
        if not isinstance(result, FxNode):
            return self.builder.constant(result)
        found = self._env.get(result)
        if isinstance(found, Traced):
            return Ref(self._memory.read(found))
        return self.builder.constant(result.meta["val"])

    def _mutations(self) -> Iterator[tuple[str, int]]:
        for traced in self._outside:
            if traced.storage.version == 0:
                continue
            original = self._original(traced)
            if original is None or original.source is Source.INPUT:
                continue  # a minibatch is nobody's state: the pure twin leaves it as it was
            if original.source is Source.BUFFER:
                yield original.name, self._memory.read(traced)
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


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(part, Tensor) for part in value)
    )
