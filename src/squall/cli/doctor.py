"""``squall doctor``: the examination, as lines or as JSON."""

import json

from squall.cli.outcome import FAILED
from squall.doctor.examination import examine


def doctor(*, as_json: bool) -> None:
    """Examine this machine and say what was found; exits with 1 if training is impossible."""
    examination = examine()
    for line in [json.dumps(examination.as_json())] if as_json else examination.lines():
        print(line)
    if not examination.is_possible:
        raise SystemExit(FAILED)
