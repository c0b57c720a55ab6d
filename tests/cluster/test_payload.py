"""Tests of squall.cluster.payload: packed and unpacked in this process, and in one fresh one.

Faults planted to check these tests, each caught: storages not joined by their identity - a shared mapping for a private
one - buffers kept inside the pickle - modules left registered by value - the walk that names culprits taken out - the
alignment of buffers set to 1 - ModelError for what lies in no module - `unpack` leaving its descriptor open - hollow
tensors sent with their bytes - a pickler that holds itself.
"""

import functools
import gc
import os
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import squall.errors
from squall.cluster.payload import Payload, pack, unpack
from squall.errors import ConfigError, ModelError


def sent(obj: Any) -> Any:
    payload = pack(obj)
    try:
        return unpack(payload)
    finally:
        payload.close()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 30)
        self.lock = threading.Lock()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()


@dataclass(frozen=True)
class Wish:
    model: Any = None
    train: Any = None
    loss: Any = None


class Picky:
    """Travels without its lock, but holds something else that cannot."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows = (n for n in range(3))

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}


def test_hollow_tensors_arrive_without_their_bytes_and_all_others_with_them() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    whole = pack(model)

    payload = pack(model, hollow=[model[0].weight])
    received = unpack(payload)

    assert whole.num_bytes - payload.num_bytes >= 4 * 299 * 300
    assert received[0].weight.shape == (300, 300)
    assert received[0].weight.requires_grad
    assert torch.equal(received[0].bias, model[0].bias)
    assert torch.equal(received[1].weight, model[1].weight)
    for one in (whole, payload):
        one.close()


def test_what_was_packed_is_not_held_by_the_packing() -> None:
    gc.disable()
    try:
        model = nn.Linear(30, 30)
        seen = weakref.ref(model)
        pack({"model": model}).close()
        del model

        assert seen() is None
    finally:
        gc.enable()


def test_a_model_arrives_with_its_values_and_computes_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.LSTM(50, 3))
    x = torch.randn(4, 40)

    copy = sent(model)

    torch.testing.assert_close(copy(x)[0], model(x)[0])
    assert {n: b.dtype for n, b in copy.named_buffers()} == {n: b.dtype for n, b in model.named_buffers()}


def test_parameters_stay_leaves_and_tied_ones_tied() -> None:
    model = nn.ModuleDict({"inside": nn.Linear(100, 100), "out": nn.Linear(100, 100)})
    model["out"].weight = model["inside"].weight
    model["out"].bias.requires_grad_(False)

    copy = sent(model)

    assert copy["out"].weight is copy["inside"].weight
    assert isinstance(copy["out"].weight, nn.Parameter)
    assert copy["out"].weight.is_leaf
    assert [p.requires_grad for p in copy.parameters()] == [True, True, False]
    copy["out"](torch.ones(1, 100)).sum().backward()
    assert copy["inside"].weight.grad.shape == (100, 100)


def test_views_of_one_storage_go_on_sharing_it_and_lie_in_it_once() -> None:
    flat = torch.arange(100_000.0)
    parts = {
        "flat": flat,
        "tail": flat[90_000:],
        "rows": flat.view(1000, 100).t(),
        "held": nn.Parameter(flat[:10]),
    }

    payload = pack(parts)
    copy = unpack(payload)
    copy["flat"][90_005] = -1
    with torch.no_grad():
        copy["held"][3] = -2

    assert copy["tail"][5].item() == -1
    assert copy["rows"][5, 900].item() == -1
    assert copy["rows"].stride() == (1, 100)
    assert copy["flat"][3].item() == -2
    assert flat[90_005].item() == 90_005
    assert payload.num_bytes < 1.1 * flat.nbytes
    payload.close()


def test_what_one_role_writes_no_other_sees() -> None:
    model, data = nn.Linear(100, 100, bias=False), np.zeros((100, 100))
    payload = pack((model, data))
    (one, one_data), (other, other_data) = unpack(payload), unpack(payload)
    before = model.weight.detach().clone()

    with torch.no_grad():
        one.weight.fill_(7)
    one_data += 1

    torch.testing.assert_close(other.weight.detach(), before)
    torch.testing.assert_close(model.weight.detach(), before)
    assert other_data.sum() == 0
    torch.testing.assert_close(unpack(payload)[0].weight.detach(), before)
    payload.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.arange(2000, dtype=torch.bfloat16),
        torch.arange(2000) > 5,
        torch.zeros(300, dtype=torch.complex64),
        torch.arange(3000).view(3, 1000).expand(2, 3, 1000),
        torch.arange(3001, dtype=torch.uint8)[1:],
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_of_any_type_and_shape_arrives(tensor: torch.Tensor) -> None:
    copy = sent([torch.zeros(1999, dtype=torch.int8), tensor])[1]

    assert torch.equal(copy, tensor)
    assert (copy.dtype, copy.stride()) == (tensor.dtype, tensor.stride())
    alignment = 64 if tensor.untyped_storage().nbytes() >= 1024 else 1  # smaller ones lie in the pickle
    assert copy.untyped_storage().data_ptr() % alignment == 0


def test_arrays_arrive_writable_and_in_their_order() -> None:
    array = np.asfortranarray(np.arange(6000, dtype=np.int16).reshape(2, 3000))
    small = np.array(["a", "b"], dtype=object)

    copy, same, copy_small = sent((array, array, small))

    np.testing.assert_array_equal(copy, array)
    assert copy is same
    assert copy.flags.f_contiguous
    assert copy.flags.writeable
    assert copy_small.tolist() == ["a", "b"]


def test_the_bytes_of_tensors_are_not_in_the_pickle_and_take_no_memory_until_written() -> None:
    payload = pack(torch.ones(8 << 20))
    before = private_kilobytes()

    copy = unpack(payload)

    assert copy.sum().item() == 8 << 20  # reads every page
    assert private_kilobytes() - before < 8 << 10
    payload.close()


def private_kilobytes() -> int:
    rows = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return next(int(row[1]) for row in rows if row[0] == "Anonymous:")


def test_nothing_is_left_when_the_last_tensor_is_gone() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        copy = sent({"x": torch.ones(5000), "y": np.ones(5000)})
        assert copy["x"].sum() == copy["y"].sum()
        del copy
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fresh_process_needs_neither_the_main_module_nor_the_recipe() -> None:
    recipe = types.ModuleType("recipe_that_is_no_file")
    exec("def scaled(x):\n    return 3 * x", recipe.__dict__)
    sys.modules[recipe.__name__] = recipe
    offset = torch.full((1000,), 0.5)
    payload = pack(lambda x: recipe.scaled(x) + offset[:2].tolist()[0], by_value_modules=[recipe])
    program = (
        "import sys\n"
        "from squall.cluster.payload import Payload, unpack\n"
        "print(unpack(Payload(fd=int(sys.argv[1]), header=bytes.fromhex(sys.argv[2])))(2))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(payload.fd), payload.header.hex()],
        pass_fds=[payload.fd],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    del sys.modules[recipe.__name__]
    payload.close()
    assert (done.stdout, done.returncode) == ("6.5\n", 0), done.stderr


def test_modules_are_by_value_only_while_packing() -> None:
    mine = types.ModuleType("mine_for_a_moment")
    sys.modules[mine.__name__] = mine
    cloudpickle.register_pickle_by_value(mine)
    try:
        pack(1, by_value_modules=[mine, squall.errors]).close()
        assert cloudpickle.list_registry_pickle_by_value() == {mine.__name__}
    finally:
        cloudpickle.unregister_pickle_by_value(mine)
        del sys.modules[mine.__name__]


def closing_over(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize(
    ("obj", "path", "type_name", "kind"),
    [
        (Wish(model=Model()), "model.encoder.lock", "_thread.lock", ModelError),
        (Wish(train=[1, {"rows": (n for n in range(3))}]), "train[1]['rows']", "generator", ConfigError),
        (Wish(train=Picky()), "train.rows", "generator", ConfigError),
        (Wish(loss=closing_over(threading.Lock())), "loss, its variable value", "_thread.lock", ConfigError),
        (Wish(loss=functools.partial(print, threading.Lock())), "loss.args[0]", "_thread.lock", ConfigError),
        (Wish(loss=Model().forward), "loss.__self__.encoder.lock", "_thread.lock", ModelError),
        (threading.Lock(), "_thread.lock", "_thread.lock", ConfigError),
    ],
)
def test_what_cannot_be_sent_is_named_with_the_way_out(
    obj: Any, path: str, type_name: str, kind: type[ConfigError]
) -> None:
    with pytest.raises(ConfigError) as caught:
        pack(obj)

    assert type(caught.value) is kind
    assert caught.value.subject == path
    assert repr(type_name) in str(caught.value)
    assert "Pass a function that returns it" in str(caught.value)


def test_the_name_of_the_object_begins_the_path() -> None:
    with pytest.raises(ModelError, match=r"^model\.encoder\.lock: expected"):
        pack(Model(), name="model")


def test_an_object_that_holds_itself_does_not_send_the_search_in_circles() -> None:
    loop: dict[str, Any] = {"many": list(range(5000))}
    loop["loop"] = loop
    loop["lock"] = threading.Lock()
    with pytest.raises(ConfigError, match=r"^train\['lock'\]: expected"):
        pack(loop, name="train")


def test_a_payload_is_a_descriptor_and_a_few_bytes() -> None:
    payload = pack([torch.ones(1000)] * 100)
    again = Payload(fd=os.dup(payload.fd), header=bytes(payload.header))
    payload.close()
    assert len(again.header) == 32
    assert sum(t.sum().item() for t in unpack(again)) == 100_000
    again.close()


def test_code_that_travels_by_value_keeps_the_name_of_its_file() -> None:
    function = eval(compile("lambda: 1 / 0", "their_file.py", "eval"), {"__name__": "__main__"})
    payload = pack(function)
    received = unpack(payload)
    payload.close()
    assert received.__code__.co_filename == "their_file.py"
