"""What may be asked for, and where."""

from typing import Any

import pytest
import torch
from torch import nn

import squall

DATA = (torch.zeros(4, 3), torch.zeros(4, 1))


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "60", True])
def test_an_interval_is_a_number_of_seconds_above_0(value: Any) -> None:
    with pytest.raises(squall.ConfigError, match="a number above 0, of seconds"):
        squall.Interval(value)


@pytest.mark.parametrize("value", ["Ack", 60, None])
def test_what_is_no_durability_is_refused(value: Any) -> None:
    with pytest.raises(squall.ConfigError, match=r'Job\(durability=\): expected "none", "ack" or'):
        squall.Job(nn.Linear(3, 1), DATA, durability=value)


def test_where_shards_end_with_the_calling_process_only_none_can_be_promised() -> None:
    cluster = squall.InProcess()
    with pytest.raises(squall.ConfigError, match="where shards live in the calling process"):
        squall.fit(nn.Linear(3, 1), DATA, loss="mse", cluster=cluster, durability="ack", progress=False)
