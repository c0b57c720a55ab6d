"""Tests of squall.cli.summary: the closing lines, whatever is known of the run.

Faults planted here by hand, each seen to fail a test: a measurement that is not finite printed · a path not quoted ·
`evaluate` offered for a run that is not finished · the loss above the accuracy · zero counts of blocks left out · a
line printed for what is not known.
"""

from pathlib import Path

from squall.cli.summary import closing_summary

ALL = {
    "why": "all steps are done",
    "wall_s": 3725.0,
    "test_loss": 0.25,
    "test_accuracy": 0.9312,
    "train_loss": 0.125,
    "samples_per_second": 12345.6,
    "times_one_replica": 1.9,
    "staleness_mean": 1.02,
    "blocks_redone": 3,
    "blocks_refused": 0,
    "versions": [1, 2],
}


def test_a_run_that_knows_everything_says_it_in_nine_lines() -> None:
    assert closing_summary(ALL, Path("runs/demo-1")) == [
        "ended          all steps are done, after 1 h 02 min",
        "test accuracy  93.12 %",
        "test loss      0.25",
        "train loss     0.125",
        "speed          12,346 examples per second, 1.90 times one replica",
        "staleness      1.02 updates on average",
        "blocks         3 redone, 0 refused",
        "run            runs/demo-1",
        "next           squall evaluate runs/demo-1",
    ]


def test_what_is_not_known_is_left_out() -> None:
    metrics = {
        "why": "",
        "test_loss": float("nan"),
        "train_loss": None,
        "samples_per_second": None,
        "error": None,
    }
    assert closing_summary(metrics, Path("d")) == ["ended  over", "run    d", "next   squall evaluate d"]


def test_a_run_that_is_not_finished_offers_to_resume_it_by_a_command_that_a_shell_reads_right() -> None:
    lines = closing_summary({"why": "stopped"}, Path("my runs/a$b"), finished=False)
    assert lines[-1] == "next   squall resume 'my runs/a$b'"


def test_what_partitions_sent_is_told_with_what_was_planned() -> None:
    lines = closing_summary({"partition_bytes": 2100.0, "partition_bytes_planned": 2000.0}, Path("d"))
    assert lines[1] == "partitions  2.10 kB between them a minibatch, 2.00 kB as planned"


def test_an_error_is_one_line_of_the_summary() -> None:
    lines = closing_summary(
        {"why": "failed", "error": "ValueError:\n  \x1b[31mbad"}, Path("d"), finished=False
    )
    assert "error  ValueError: [31mbad" in lines


def test_evaluation_is_offered_only_to_a_run_that_had_a_test_set() -> None:
    assert closing_summary({"train_loss": 0.1}, Path("d"))[-1] == "next        squall ledger d"


def test_the_picture_of_the_loss_is_named_where_there_is_one() -> None:
    assert "loss curve  d/loss.png" in closing_summary({}, Path("d"), plot=Path("d/loss.png"))
