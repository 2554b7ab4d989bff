"""How long a row's texts are, found while planning, and the groups that come of it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from batchgen.errors import UsageError
from batchgen.models import lengths, tokens
from batchgen.models.flow_facts import Z_LENGTHS
from batchgen.models.folder import facts_of
from batchgen.planner import Grouper, order_of_groups
from batchgen.weights import Model
from tests import families, tiny

TEXTS = ["a fox", None, "", "a fox", "{} {0} %s", " \n\n a\n ", "<|im_end|>\n<|im_start|>user", "🐉 龍 é", tiny.LONG]


@pytest.mark.parametrize("kind", ["qwen", "z-image", "cogview"])
def test_a_text_is_as_long_in_a_plan_as_it_is_encoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_AT_ONCE", 3)
    model = families.engine(kind).model
    measure = tokens.lengths_of(Model(path=str(families.folder(kind))), families.engine(kind).facts)
    assert measure is not None
    encoded = [len(embedding) for (embedding,) in model.encode([text or "" for text in TEXTS])]
    assert measure(pa.array(TEXTS)).tolist() == model.lengths.of(np.array(encoded)).tolist()


def test_a_text_takes_the_first_length_that_holds_it() -> None:
    assert Z_LENGTHS.of(np.array([1, 32, 33, 64, 511, 512, 9_999])).tolist() == [32, 32, 64, 64, 512, 512, 512]


def test_measuring_needs_no_torch() -> None:
    program = (
        "import sys, pyarrow as pa; from batchgen.job import Model;"
        "from batchgen.models.folder import facts_of; from batchgen.models.tokens import lengths_of;"
        f"model = Model(path={str(families.folder('qwen'))!r});"
        "assert lengths_of(model, facts_of(model))(pa.array(['a', 'abc'])).tolist()[1] > 2;"
        "sys.exit(bool({'torch', 'diffusers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_transformers_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(path=str(families.folder("z-image")))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="is planned by each prompt's tokens, which transformers counts"):
        tokens.lengths_of(model, facts_of(model))


def test_rows_are_grouped_by_both_lengths_and_by_none_that_has_no_effect() -> None:
    known = facts_of(Model(path=str(families.folder("z-image"))))
    grouper = Grouper.of(known, ["euler"])
    prompts, negatives = np.array([64, 32, 32, 32, 512]), np.array([32, 64, 32, 512, 32])
    is_guided, num = np.array([True, True, False, False, True]), 5
    found, _ = grouper.assign(
        np.full(num, 32_768), np.full(num, 2_048), is_guided, np.zeros(num, np.int32), np.full(num, 4),
        lengths=(prompts, negatives),
    )  # fmt: skip
    groups = [grouper.groups[number] for number in found]
    assert [(one.text_length, one.negative_length) for one in groups] == [
        *((64, 32), (32, 64), (32, 0), (32, 0), (512, 32)),
    ]
    assert {(one.width, one.height) for one in groups} == {(32_768, 2_048)}
    ordered = [grouper.groups[number].lengths for number in order_of_groups(grouper.groups)]
    assert ordered == [", text 512 and 32", ", text 64 and 32", ", text 32 and 64", ", text 32"]


def test_a_template_that_changes_texts_is_followed() -> None:
    tokenizer = families.z_image().tokenizer
    tokenizer.chat_template = "{{ messages[0].content | trim }}!"
    assert Z_LENGTHS.measured(tokenizer, pa.array(["a" * 31 + " \n", "a" * 32])).tolist() == [32, 64]
