"""One replica is a plain PyTorch loop: the same minibatches, the same dropout masks, the same parameters.

Run it with ``python examples/plain_loop.py``. It trains one network twice, once by a loop that you could have
written and once by Squall, and prints how far apart the two end up.
"""

import torch
from torch import nn

import squall
from squall.data import order, seed_for

SEED, BATCH_SIZE, EPOCHS, LEARNING_RATE = 7, 25, 2, 0.05


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 10, generator=generator)
    y = (x[:, :5].sum(dim=1) > 0).long()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 2))

    run = squall.fit(
        model,
        (x, y),
        strategy=squall.Downpour(rule=squall.Adagrad(learning_rate=LEARNING_RATE)),
        replicas=1,
        shards=3,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        seed=SEED,
        cluster=squall.InProcess(),
        progress=False,
    )

    # Squall left `model` as it was, so the loop starts where the run started.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        examples = torch.from_numpy(order(len(x), SEED, epoch))
        for position, chosen in enumerate(examples.split(BATCH_SIZE)):
            torch.manual_seed(seed_for(SEED, epoch, position))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()

    trained = run.state_dict()
    distance = max((trained[name] - value).abs().max().item() for name, value in model.state_dict().items())
    print(f"{EPOCHS * len(x) // BATCH_SIZE} steps, largest difference of a parameter: {distance:.2g}")


if __name__ == "__main__":
    main()
