"""A replica's tensors on a device with memory of its own, in ordinary memory under the name "cpu:0".

Faults planted by hand, each seen to fail a test: parameters of the device are views all the same · a swap copies
nothing · a gradient is not added to the block's · the batch is not moved · the device is seeded by the run only ·
a parameter's gradient is still the sum of the block before · sums are taken for gradients and added again · a watched
parameter's gradients are summed by backward.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squall.data import Minibatches, TensorSource, seed_for
from squall.errors import ModelError, UserCodeError
from squall.model.layout import Layout
from squall.model.objective import Objective
from squall.model.parameters import ParameterSpace
from squall.replica import compute as module
from squall.replica.compute import ReplicaCompute, Task
from squall.replica.downpour import Compute
from squall.rules.sgd import Sgd

APART = torch.device("cpu:0")


class Net(nn.Module):
    """Parameters in C order and in another, one of them split over slices, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.turned = nn.Parameter(torch.randn(8, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x) + x @ self.turned)
        return self.two(self.drop(hidden))  # type: ignore[no-any-return]


class Replica:
    """A `ReplicaCompute` with its vectors, the second buffer filled with other values."""

    def __init__(
        self, device: torch.device, *, sums: bool = False, watch: Callable[[Tensor], None] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = Net()
        if watch is not None:
            self.model.two.weight.register_post_accumulate_grad_hook(watch)
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator)
        layout = Layout.balanced(ParameterSpace.of(self.model), num_shards=3)

        def fresh(scale: float) -> list[Tensor]:
            return [torch.randn(spec.size, generator=generator) * scale for spec in layout.slices]

        self.gradients, self.buffers = fresh(0.0), (fresh(0.3), fresh(0.6))
        self.before = [vector.clone() for buffer in self.buffers for vector in buffer]
        task = Task(
            model=self.model,
            objective=Objective(loss="cross_entropy", step=None),
            minibatches=Minibatches(TensorSource(data), 4, seed=0),
            layout=layout,
            local=None if sums else Sgd(learning_rate=0.5),
            streams=not sums,
            seed=3,
            device=device,
        )
        self.compute = ReplicaCompute(
            name="replica0.0", task=task, gradients=[self.gradients], buffers=self.buffers
        )

    def block(self, *positions: int, local_step: bool = True) -> list[Any]:
        return [
            self.compute.compute(
                Compute(
                    epoch=0,
                    position=position,
                    is_first=position == positions[0],
                    is_last=position == positions[-1],
                    local_step=local_step,
                    minibatches=0,
                )
            )
            for position in positions
        ]


def test_losses_and_gradients_are_those_of_a_model_in_the_slices_themselves() -> None:
    apart, inside = Replica(APART), Replica(torch.device("cpu"))

    for swap, positions in ((1, (0, 1, 2)), (0, (3, 4))):
        for replica in (apart, inside):
            replica.compute.swap(swap)
        assert apart.block(*positions) == inside.block(*positions)

        for mine, theirs in zip(apart.gradients, inside.gradients, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.any()


def test_a_blocks_gradient_is_the_sum_of_its_minibatches() -> None:
    apart, sums = Replica(APART), []
    for position in (0, 1):
        apart.block(position, local_step=False)
        sums.append([vector.clone() for vector in apart.gradients])

    apart.block(0, 1, local_step=False)

    for gradient, first, second in zip(apart.gradients, *sums, strict=True):
        assert torch.equal(gradient, first + second)


def test_backward_adds_to_the_blocks_sum_itself_where_it_may() -> None:
    apart, inside = Replica(APART), Replica(torch.device("cpu"), sums=True)

    for positions in ((0, 1, 2), (3,), (4, 5)):
        assert apart.block(*positions, local_step=False) == inside.block(*positions, local_step=False)
        for mine, theirs in zip(apart.gradients, inside.gradients, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.any()

    inside.block(0, 1, local_step=False)
    vectors = {vector.untyped_storage().data_ptr() for vector in inside.gradients}
    summed = [
        p.grad is not None and p.grad.untyped_storage().data_ptr() in vectors
        for p in inside.model.parameters()
    ]
    assert any(summed), "nothing was added in place, so this test shows nothing"


def test_a_block_that_was_given_up_leaves_nothing_in_the_next_ones_sum() -> None:
    fresh, used = (Replica(torch.device("cpu"), sums=True) for _ in range(2))
    used.compute.compute(
        Compute(epoch=0, position=0, is_first=True, is_last=False, local_step=False, minibatches=0)
    )

    for replica in (fresh, used):
        replica.block(1, 2, local_step=False)

    assert all(torch.equal(a, b) for a, b in zip(fresh.gradients, used.gradients, strict=True))


def test_a_users_hook_sees_the_gradient_of_one_minibatch() -> None:
    seen: list[Tensor] = []

    def watch(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    alone, inside = (Replica(torch.device("cpu"), sums=True, watch=watch) for _ in range(2))
    for position in (0, 1, 2):
        alone.block(position, local_step=False)
    inside.block(0, 1, 2, local_step=False)

    assert all(torch.equal(one, other) for one, other in zip(seen[:3], seen[3:], strict=True))


def test_a_model_apart_writes_to_no_buffer_and_shares_no_memory_with_one() -> None:
    apart = Replica(APART)
    apart.block(0, 1)  # with local steps

    vectors = [vector for buffer in apart.buffers for vector in buffer]
    assert all(torch.equal(vector, was) for vector, was in zip(vectors, apart.before, strict=True))
    memory = {vector.untyped_storage().data_ptr() for vector in vectors}
    assert not memory & {parameter.untyped_storage().data_ptr() for parameter in apart.model.parameters()}


def test_batches_are_moved_and_the_devices_generator_is_seeded_by_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "seed_device", lambda device, seed: seen.append((device, seed)))
    monkeypatch.setattr(module, "to_device", lambda batch, device: (seen.append(device), batch)[1])  # type: ignore[func-returns-value]

    Replica(APART).block(5)
    Replica(torch.device("cpu")).block(5)

    assert seen == [(APART, seed_for(3, 0, 5)), APART]


def test_a_model_that_cannot_be_moved_is_told_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: nn.Module, device: torch.device) -> None:
        raise TypeError("no float64 on this device")

    monkeypatch.setattr(Net, "to", refuse)
    with pytest.raises(UserCodeError, match=r"replica0\.0: TypeError: no float64 on this device"):
        Replica(APART)


def test_a_device_without_room_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: nn.Module, device: torch.device) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(Net, "to", refuse)
    with pytest.raises(MemoryError, match="out of memory"):
        Replica(APART)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_a_forward_that_writes_to_a_parameter_is_refused_by_name(device: str) -> None:
    replica = Replica(torch.device(device))
    replica.block(0)
    replica.model.two.register_forward_pre_hook(lambda module, inputs: clamp_(module.weight))

    with pytest.raises(ModelError, match=r"'two.weight'.*writes to it"):
        replica.block(1)


def clamp_(weight: Tensor) -> None:
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)
