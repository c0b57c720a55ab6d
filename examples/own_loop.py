"""Your own loop, on shards: the loop of plain_loop.py with three lines changed, in two processes at once.

Run it with ``python examples/own_loop.py``. It serves a network, starts itself twice more as workers, each of which
trains on its half of the data, and prints the accuracy of what they have made together. With ``torchrun``,
``multiprocessing`` or two terminals it is the same: give each process the address and the token.
"""

import os
import subprocess
import sys

import torch
from torch import Tensor, nn

import squall

BATCH_SIZE, EPOCHS, NUM_WORKERS = 25, 4, 2


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :5].sum(dim=1) > 0).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))


def work(worker: int) -> None:
    """What each process does."""
    torch.set_num_threads(max(1, torch.get_num_threads() // NUM_WORKERS))  # cores are shared
    x, y = (part[worker::NUM_WORKERS] for part in data())
    model = network()
    # optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    optimizer = squall.DownpourOptimizer(model, os.environ["ADDRESS"], token=os.environ["TOKEN"])  # 1
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(BATCH_SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    optimizer.close()  # 2


def main() -> None:
    model = network()
    with squall.serve(model, shards=2, rule=squall.Adagrad(learning_rate=0.05)) as servers:  # 3
        told = os.environ | {"ADDRESS": servers.address, "TOKEN": servers.token}
        command = [sys.executable, __file__]
        workers = [subprocess.Popen([*command, str(n)], env=told) for n in range(NUM_WORKERS)]
        codes = [worker.wait() for worker in workers]
        model.load_state_dict(servers.state_dict())
    x, y = data()
    accuracy = (model(x).argmax(dim=1) == y).float().mean().item()
    print(f"{NUM_WORKERS} processes ended with {codes}; accuracy {accuracy:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(int(sys.argv[1]))
    else:
        main()
