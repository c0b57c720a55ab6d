"""Mean staleness of a real run, whatever the processors gave each replica."""

from typing import Any

import numpy as np


def staleness_under_way(rows: Any) -> float:
    """Mean staleness that each update of one slice added, of those that came while every replica was under way.

    It is counted from the updates: how many pushes were based on less, and applied later. So it is n - 1 where each
    replica fetches right behind its push, and less where one comes late; of a replica that starts late, what was applied
    before its first push is not counted.

    Args:
        rows: what the ledger tells of applied pushes to one slice.
    """
    own = [rows["version"][rows["replica"] == replica] for replica in np.unique(rows["replica"])]
    first, last = max(versions.min() for versions in own), min(versions.max() for versions in own)
    assert last - first >= 50, "replicas that work at the same time"
    added = [
        ((rows["based_on"] < version) & (rows["version"] > version)).sum() for version in range(first, last)
    ]
    return float(np.mean(added))
