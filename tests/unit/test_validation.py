"""Sentences on documents: what is wrong with a value, wherever in the document it is. tests/attacks has many more."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from shoal_protos.validation import LONGEST_SHOWN, Allowed, every_sentence, sentence, shown


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    names: list[str] = []
    either: Annotated[Annotated[int, Field(ge=1)] | bool | None, Allowed("a count, true or false")] = None


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    inner: Inner
    many: list[Inner] = []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["`inner` is missing from the thing"]),
        (3, ["the thing is 3; expected an object {…}"]),
        ({"inner": {"names": ["a", 1]}}, ["`inner.names[1]` is 1; expected a string"]),
        ({"inner": {"either": "x"}}, ['`inner.either` is "x"; expected a count, true or false'] * 2),
        ({"inner": {}, "many": [{}, {"either": 0}]}, ["`many[1].either` is 0; expected a count, true or false"] * 2),
        (
            {"inner": {}, "many": [{"name": 1}]},
            [
                "`many[0].name` is an unknown key (given: 1); did you mean `many[0].names`? "
                "Allowed in `many[0]` are either, names"
            ],
        ),
    ],
)
def test_a_sentence_names_the_key_what_was_given_and_what_was_expected(given: object, expected: list[str]) -> None:
    with pytest.raises(ValidationError) as refusal:
        Outer.model_validate(given)
    assert [sentence(fault, "the thing", Outer) for fault in refusal.value.errors()] == expected


def test_a_section_stands_where_it_does_in_the_whole() -> None:
    with pytest.raises(ValidationError) as refusal:
        Inner.model_validate({"names": 1})
    found = sentence(refusal.value.errors()[0], "the thing", Inner, "outer.inner")
    assert found == "`outer.inner.names` is 1; expected a list"


def test_an_unknown_key_comes_before_the_one_that_is_missing_for_it() -> None:
    with pytest.raises(ValidationError) as refusal:
        Outer.model_validate({"iner": {}})
    assert every_sentence(refusal.value.errors(), "the thing", Outer).startswith("`iner` is an unknown key (given: {})")


def test_of_a_long_value_only_the_beginning_is_written() -> None:
    written = []

    class Part:
        def __repr__(self) -> str:
            written.append(self)
            return "x" * 30

    assert len(shown([Part() for _ in range(1000)])) == LONGEST_SHOWN
    assert len(written) < 5


def test_a_value_that_contains_itself_is_shown() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert shown(endless) == '"[[...]]"'
