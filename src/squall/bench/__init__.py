"""How fast Squall is, beside what it is to be compared with: one file for each figure, one command for all.

It stands on the roof and uses Squall as a user does. Whatever is compared is measured alternately in one run, with one
thread a worker, and a run's own throughput is computed again from its ledger. docs/benchmarks.md says what each
figure means and how to measure.
"""
