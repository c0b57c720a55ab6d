"""Tests of squall.errors: whose line an error names.

Faults planted by hand, each seen to fail a test here: a folder of the user's called "torch" taken for torch's · the
standard library's line named · that of an installed package named where the user's own is known · torch's line named as
if it were the user's · recipes that come with Squall not counted as the user's own.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import squall
from squall.errors import UserCodeError, is_library, users_line


def function_of(file: str, text: str) -> Callable[..., Any]:
    """`f` of a source text that says it is of this file."""
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    function: Callable[..., Any] = names["f"]
    return function


def lines_of(function: Callable[[], Any]) -> tuple[str, str]:
    """The line that an exception's description names, and what is read from its printed traceback."""
    try:
        function()
    except Exception as error:
        told = UserCodeError.of(error, role="replica0.0", step="")
        return told.line, users_line("".join(traceback.format_tb(error.__traceback__)))
    raise AssertionError("it was to raise")


RAISES = "def f(call=None):\n    return call() if call else 1 / 0"


@pytest.mark.parametrize(
    "file", ["/home/me/torch/net.py", "/srv/squall/net.py", "/x/numpy/net.py", "<stdin>"]
)
def test_a_file_is_the_users_own_whatever_its_folder_is_called(file: str) -> None:
    line = f'File "{file}", line 2, in f'
    assert lines_of(function_of(file, RAISES)) == (line, line)


@pytest.mark.parametrize(
    "text",
    [
        "import json\ndef f():\n    return json.loads('{')",
        "import torch\ndef f():\n    return torch.nn.Linear(2, 2)(torch.ones(3))",
        "from torch import nn, ones\ndef f():\n    return nn.Sequential(nn.Linear(2, 2))(ones(3))",
    ],
    ids=["the standard library", "torch", "torch, deeper"],
)
def test_the_line_is_the_deepest_of_the_users_own(text: str) -> None:
    line = 'File "/home/me/net.py", line 3, in f'
    assert lines_of(function_of("/home/me/net.py", text)) == (line, line)


def test_an_installed_package_is_named_where_nothing_of_the_users_own_is() -> None:
    theirs = function_of("/venv/lib/python3.11/site-packages/others/net.py", RAISES)
    mine = function_of("/home/me/net.py", RAISES)

    assert lines_of(lambda: torch.no_grad()(mine)(theirs))[0] == 'File "/home/me/net.py", line 2, in f'
    told = UserCodeError.of(caught(torch.no_grad()(theirs)), role="", step="").line
    assert told == 'File "/venv/lib/python3.11/site-packages/others/net.py", line 2, in f'


def test_a_line_of_torch_is_not_passed_off_as_the_users() -> None:
    error = caught(torch.nn.Linear(2, 2).forward, torch.ones(3))
    told = UserCodeError.of(error, role="", step="")
    assert told.line.startswith(f'no line of yours: File "{Path(torch.__file__).parent}')


def test_recipes_that_come_with_squall_are_a_users() -> None:
    ours = Path(squall.__file__).parent
    assert is_library(str(ours / "api.py"))
    assert not is_library(str(ours / "recipes" / "digits.py"))


def caught(function: Callable[..., Any], *args: Any) -> Exception:
    try:
        function(*args)
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return error
    raise AssertionError("it was to raise")
