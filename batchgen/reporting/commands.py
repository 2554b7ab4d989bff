"""The commands that show a run's pictures: `report` and `sheet`."""

from __future__ import annotations

from pathlib import Path

import click

from batchgen.wording import counted, shorten


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="The page [default: DIRECTORY/report.html]."
)
@click.option(
    "--images", type=click.IntRange(0, 2000), default=240, show_default=True, help="So many pictures at most."
)
def report(directory: Path, out: Path | None, images: int) -> None:
    """Write an HTML page of the run in DIRECTORY, with pictures.

    One file that opens in any browser, without a network; of a run that is not finished, too.

    \b
    Example: batchgen report prompts-out
    """
    from batchgen.reporting.writing import write_report
    from batchgen.rundir import RunDirectory

    target = out or directory / "report.html"
    shown = write_report(RunDirectory(directory), target, images)
    click.echo(f"a report with {counted(shown, 'picture')} in {target}")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="The picture [default: DIRECTORY/sheet.png]."
)
@click.option("--rows", type=click.IntRange(1, 400), default=100, show_default=True, help="So many pictures at most.")
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only images that meet it, such as width=512, steps>=30, prompt~fox; given several times, all.",
)
@click.option(
    "--id", "ids", multiple=True, metavar="ID", help="Only images of this row; given several times, of these rows."
)
@click.option("--title", default="", metavar="TEXT", help="A title over the pictures.")
def sheet(
    directory: Path, out: Path | None, rows: int, where: tuple[str, ...], ids: tuple[str, ...], title: str
) -> None:
    """Write a contact sheet of pictures in DIRECTORY.

    CONDITION is a column of metadata.parquet, one of = != < <= > >= ~, and a value; ~ means that it contains the text.

    \b
    Example: batchgen sheet prompts-out --where prompt~fox --title Foxes
    """
    from batchgen.rundir import RunDirectory
    from batchgen.selection import selection
    from batchgen.sheet import write_sheet

    target = out or directory / "sheet.png"
    shown = write_sheet(RunDirectory(directory), target, rows, selection(where, ids), title)
    click.echo(f"{counted(shown.num_pictures, 'picture')} in {target}")
    if shown.missing_letters:
        letters = shorten(shown.missing_letters, 20)
        click.echo(f"no font here has {letters}: boxes stand for them until one that has them is installed", err=True)
