"""Prompts longer than a model reads: found while planning, by the model's own tokenizer."""

from __future__ import annotations

from batchgen.errors import UsageError
from batchgen.job import Job
from batchgen.survey import Survey
from batchgen.wording import counted, with_more

SHOWN = 5


def check_truncation(surveyed: Survey, job: Job) -> None:
    """With `plan.on_truncate = "error"`: refuse prompts that would lose tokens, by a UsageError that names them."""
    if job.plan.on_truncate != "error":
        return
    from batchgen.models.tokens import count_tokens, load_tokenizer

    try:
        tokenizer = load_tokenizer(job.model)
    except ImportError as error:
        raise UsageError(f"--on-truncate error counts tokens with transformers, which is not here: {error}") from None
    if tokenizer is None:
        return
    found, num_found = list[str](), 0
    for checked, _, good in surveyed.batches():
        for column in ("prompt", "negative_prompt"):
            texts = getattr(checked, column).take(good).fill_null("").to_pylist()
            is_negative = column == "negative_prompt"
            counts = count_tokens(tokenizer, texts, surveyed.rules.facts, are_negative=is_negative)
            for place, count in zip(good.tolist(), counts, strict=True):
                if count.dropped:
                    num_found += 1
                    if num_found <= SHOWN:
                        row = checked.first_row + place
                        found.append(_line(surveyed, row, column, count.read, count.dropped))
    if num_found:
        raise UsageError(
            f"{counted(num_found, 'prompt')} longer than the model reads (rows count from 0):\n"
            + "\n".join(with_more(found, num_found))
            + "\nShorten them, or let them be cut with --on-truncate warn (metadata counts the dropped tokens)"
        )


def _line(surveyed: Survey, row: int, column: str, read: int, dropped: int) -> str:
    file, number = surveyed.manifest.place(row)
    return f"  {file} row {number}: {column} has {read + dropped} tokens, of which the last {dropped} would be dropped"
