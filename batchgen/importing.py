"""The command `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batchgen.saying import say
from batchgen.wording import counted

_MANY = 2**40


@click.command(name="import")
@click.argument("source", required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The manifest.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME=SOURCE",
    help="The manifest's column from SOURCE's, such as prompt=caption.",
)
@click.option("--split", help="Which split of a data set.")
@click.option(
    "--grid", multiple=True, metavar="NAME=VALUES", help="Each row once with each value: steps=20,30 or steps=@FILE."
)
@click.option(
    "--template",
    "templates",
    multiple=True,
    metavar="TEXT|@FILE",
    help='Prompts of columns and grids: "a {color} {animal}".',
)
@click.option(
    "--sizes",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Each row in each size of a file with one a line, such as 768x512.",
)
@click.option("--one-size", is_flag=True, help="Each row in only one of the sizes, drawn by its id.")
@click.option(
    "--num-images", type=click.IntRange(1, 2**31 - 1), metavar="N", help="Images of each row, each with its own seed."
)
@click.option(
    "--max-images",
    type=click.IntRange(1, _MANY),
    metavar="N",
    help="Refuse what would be more images than this [default: 10000000].",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing manifest.")
def import_(
    source: str | None, out: Path, columns: tuple[str, ...], split: str | None, overwrite: bool, **options: Any
) -> None:
    """Make a manifest of a csv, tsv, jsonl, txt, data set or grid.

    SOURCE is a file, or a Hugging Face data set's name or folder; without it, rows come from templates and grids.

    \b
    Example: batchgen import captions.csv -o prompts.parquet --column prompt=caption --grid steps=20,30
    """
    from batchgen.expansion import Expansion
    from batchgen.importer import import_rows

    expansion = Expansion(**{name: value for name, value in options.items() if value is not None})
    imported = import_rows(
        source, out, columns=_columns(columns), split=split, overwrite=overwrite, expansion=expansion
    )
    for note in imported.notes:
        say(note)
    many = f", {counted(expansion.num_images, 'image')} each" if expansion.num_images else ""
    click.echo(f"{counted(imported.rows, 'row')}{many} in {out}, columns {', '.join(imported.columns)}")


def _columns(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise click.UsageError(f"--column {pair!r} is not of the form NAME=SOURCE, such as prompt=caption")
    names = [pair.partition("=")[0] for pair in pairs]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"--column {name}=… is given more than once; give each of our columns one source")
    return {name: source for name, _, source in (pair.partition("=") for pair in pairs)}
