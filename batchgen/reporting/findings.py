"""All that a page is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from batchgen.balance import Balance
from batchgen.plan_index import PlanIndex
from batchgen.records import Group
from batchgen.report import sampler_text
from batchgen.reporting.cards import Card
from batchgen.reporting.plan_counts import PlanCounts
from batchgen.reporting.rows import RowCounts
from batchgen.reporting.spending import Spending


@dataclass(frozen=True)
class Findings:
    """One run, counted."""

    name: str
    """Of the run directory."""
    index: PlanIndex
    balance: Balance
    is_finalized: bool
    plan: PlanCounts
    spending: Spending
    rows: RowCounts
    cards: Sequence[Card]
    rejected: Sequence[str]
    """Faults of the first rejected rows."""

    @cached_property
    def labels(self) -> Sequence[str]:
        """Of the groups, in their order."""
        return group_labels(self.index.groups)

    @property
    def outstanding(self) -> int:
        return self.plan.planned - self.plan.made - self.plan.failed


def group_labels(groups: Sequence[Group]) -> list[str]:
    """The groups in words; what all of them have of samplers is left out."""
    samplers = [f", {sampler_text(group)}" for group in groups]
    if len(set(samplers)) == 1:
        samplers = [""] * len(groups)
    loras = [f", LoRA set {group.lora}" if group.lora else "" for group in groups]
    return [
        f"{group.width}×{group.height}, {'guided' if group.is_guided else 'unguided'}{sampler}{group.lengths}{lora}"
        for group, sampler, lora in zip(groups, samplers, loras, strict=True)
    ]
