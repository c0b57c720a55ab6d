"""The ``squall`` command.

Importing this file imports neither torch nor NumPy, so that ``squall --help`` answers at once and ``squall train``
can start the process that imports torch for all roles before doing so itself. Each command imports what it needs.
"""

from pathlib import Path
from typing import Annotated

import typer

from squall.cli.outcome import outcome

app = typer.Typer(
    name="squall",
    help="Train one PyTorch model on machines that you cannot trust to be fast, equal, connected or alive.",
    epilog="Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 3 no replica is left, 130 and 143 on SIGINT and SIGTERM.",
    no_args_is_help=True,
    add_completion=False,
    # Plain words: they wrap, they can be searched, and they need no further import.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a run.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="End standard output with one line: a JSON object with the figures.")
]


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="squall")


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE[:FUNCTION]", help="A recipe's name, as in `digits`, or a Python file with one."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change the recipe's job, as in --set replicas=4 or --set strategy.n_push=5. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run directory, a new one; a name that ends in -N gets the next free number. "
            "Without it: a temporary one, which the summary names."
        ),
    ] = None,
    chaos: Annotated[
        str,
        typer.Option(
            metavar="FAULTS",
            help="What is to go wrong, as in --chaos 'kill:replica@p=0.01; pause:shard0,2s@t=5' (docs/chaos.md).",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Train what a recipe says."""
    with outcome():
        from squall.cli import training

        training.train(recipe, settings or [], out, chaos=chaos, as_json=as_json)


@app.command()
def resume(
    path: RunArgument,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change the recipe's job, as in --set epochs=24."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run of a recipe from its newest checkpoint, or train one that is finished on: --set epochs=24."""
    with outcome():
        from squall.cli import training

        training.resume(path, settings or [], as_json=as_json)


@app.command()
def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE[:FUNCTION]", help="A recipe's name, as in `digits`, or a Python file with one."
        ),
    ],
    partitions: Annotated[int, typer.Option(help="Over how many partitions a replica is cut.", min=1)] = 2,
    how: Annotated[
        str,
        typer.Option(
            help="auto, vertical (through layers), horizontal (between them), or team sizes as in 1,3."
        ),
    ] = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change the recipe's job, as for train."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plan into this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the plan in this file, for squall.Plan.load.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Cut a recipe's model over partitions, and say who holds what, what crosses, and what a step will take."""
    with outcome():
        from squall.cli import plans

        plans.plan(recipe, settings or [], partitions, how, svg=svg, out=out, as_json=as_json)


@app.command()
def recipes() -> None:
    """List the recipes that come with Squall."""
    with outcome():
        from squall.cli.listing import recipe_lines

        for line in recipe_lines():
            typer.echo(line)


@app.command()
def evaluate(path: RunArgument, as_json: JsonOption = False) -> None:
    """Measure a run's model on its recipe's test set."""
    with outcome():
        from squall.cli import runs

        metrics = runs.evaluate(path)
        if as_json:
            typer.echo(runs.as_json(metrics, path))
        else:
            for line in runs.table(
                ("figure", "value"), [(name, f"{value:.6g}") for name, value in metrics.items()]
            ):
                typer.echo(line)


@app.command()
def export(
    path: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A name that ends in .safetensors.")],
) -> None:
    """Write a run's model to a file of its own."""
    with outcome():
        from squall.cli import runs

        runs.export(path, file)
        typer.echo(f"wrote {file}")


@app.command()
def ledger(
    path: RunArgument,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Do a recorded run's updates again, in float64, and compare with its model."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what became of every push: who did how much, how stale it was, what was redone or refused."""
    with outcome():
        from squall.cli import runs

        told = runs.tally(path)
        differences = _replayed(path) if replay else None
        if as_json:
            if differences is not None:
                told["replay"] = differences
            typer.echo(runs.as_json(told, path))
            return
        for line in runs.tally_lines(told):
            typer.echo(line)
        if differences is not None:
            rows = [(name, f"{value:.3g}") for name, value in differences.items()]
            typer.echo("\nreplayed in float64, against the run's model:")
            for line in runs.table(("tensor", "max difference"), rows):
                typer.echo(line)


def _replayed(path: Path) -> dict[str, float]:
    from squall.cli.replay import replay

    return replay(path)


@app.command()
def explain(path: RunArgument, as_json: JsonOption = False) -> None:
    """Say what became of a run: who died when and why, what was kept, redone and lost, and the one cause."""
    with outcome():
        from squall.cli import explain as explaining
        from squall.cli import runs

        story = explaining.explain(path)
        if as_json:
            typer.echo(runs.as_json(explaining.as_dict(story), path))
            return
        for line in explaining.lines(story, path):
            typer.echo(line)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine is, whether Squall can train on it, and what to do about what is not fine."""
    with outcome():
        from squall.cli.doctor import doctor as examine

        examine(as_json=as_json)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="Which figures; without names all. --list says which there are."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each side is measured, alternately.", min=1)] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and short, to see that it works; the figures mean nothing.")
    ] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="For time-to-loss, once for each: the four idx files of Fashion-MNIST, the zip file of FSDD.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder: one JSON file for each figure is written there.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Say which figures there are.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast Squall is, beside what it is to be compared with."""
    with outcome():
        from squall.cli import bench as benchmarks

        if listing:
            for line in benchmarks.lines():
                typer.echo(line)
            return
        benchmarks.bench(names or [], rounds=rounds, quick=quick, data=data or [], out=out, as_json=as_json)


@app.command()
def version() -> None:
    """Say which version this is."""
    from squall import __version__

    typer.echo(f"squall {__version__}")
