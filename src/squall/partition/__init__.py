"""How one replica is cut over partitions: regions of values, and one rule for each op."""
