"""Sentences on documents: what is wrong with a value, wherever in the document it is. tests/attacks has many more."""

from __future__ import annotations

import time
import tracemalloc
from typing import Annotated, Any, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rule import Edit, holds, rule
from shoal_controller.api.models import JobBody
from shoal_protos.text import LONGEST_SHOWN, shown, shown_name
from shoal_protos.validation import (
    MOST_FAULTS,
    Allowed,
    Unshown,
    every_sentence,
    raise_all,
    sentence,
)


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    names: list[str] = []
    either: Annotated[Annotated[int, Field(ge=1)] | bool | None, Allowed("a count, true or false")] = None


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    inner: Inner
    many: list[Inner] = []


@rule(
    "All that is wrong with a document is said at once, unknown keys first and nothing that only follows from "
    "another fault; what may be a secret is never repeated",
    "Data, evaluations and the doors",
    broken_by=[
        Edit(
            "shoal_protos.validation",
            "    if model is not None and isinstance(given, dict) and len(read) == len(faults):\n        found +=",
            "    if model is None and isinstance(given, dict) and len(read) == len(faults):\n        found +=",
        ),
        Edit("shoal_protos.validation", 'if not any(f"`{key}`" in one for key in keys))', "if keys or one)"),
        Edit(
            "shoal_protos.validation",
            '{"extra_forbidden": 0, "value_error": 2}',
            '{"extra_forbidden": 3, "value_error": 2}',
        ),
        Edit(
            "shoal_protos.validation",
            "kind_of(value) if _may_be_secret(location, model) else shown(value)",
            "shown(value)",
        ),
        Edit(
            "shoal_protos.validation",
            "        if holder and any(map(_is_unshown, holder.model_fields.values())) and not "
            '_is_plain(fault["input"]):\n'
            '            given = kind_of(fault["input"])\n',
            "",
        ),
        Edit(
            "shoal_protos.validation",
            "    return model is not None and any(map(_is_unshown, model.model_fields.values()))\n",
            "    return False\n",
        ),
    ],
)
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


@holds("All that is wrong with a")
def test_an_unknown_key_comes_before_the_one_that_is_missing_for_it() -> None:
    with pytest.raises(ValidationError) as refusal:
        Outer.model_validate({"iner": {}})
    assert every_sentence(refusal.value.errors(), "the thing", Outer).startswith("`iner` is an unknown key (given: {})")


class Sizes(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    least: int = 1
    most: int = 4
    name: str = ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        faults = [f"`least` is {self.least}; expected at most {self.most} (`most`)"] if self.least > self.most else []
        raise_all([*faults, *(["`name` is odd"] if self.name == "odd" else [])])
        return self


@holds("All that is wrong with a")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"least": 5}, ["`least` is 5; expected at most 4 (`most`)"]),
        ({"least": 5, "name": "odd"}, ["`least` is 5; expected at most 4 (`most`)", "`name` is odd"]),
        ({"least": 5, "nme": "odd"}, ["`nme` is an unknown key (given: \"odd\"); did you mean `name`?"
          " Allowed at the top level are least, most, name", "`least` is 5; expected at most 4 (`most`)"]),
        ({"most": "x", "zz": 1}, ["`zz` is an unknown key (given: 1). Allowed at the top level are least, most, name",
          '`most` is "x"; expected a whole number']),
        ({"least": 5, "most": "x"}, ['`most` is "x"; expected a whole number']),
        ({"leats": 5, "mos": 3}, ["`leats` is an unknown key (given: 5); did you mean `least`? Allowed at the top "
          "level are least, most, name", "`mos` is an unknown key (given: 3); did you mean `most`?"]),
    ],
)  # fmt: skip
def test_all_that_is_wrong_is_said_at_once_and_nothing_that_comes_of_it(given: Any, expected: list[str]) -> None:
    with pytest.raises(ValidationError) as refusal:
        Sizes.model_validate(given)
    found = every_sentence(refusal.value.errors(), "the thing", Sizes, given)
    assert found.removeprefix(f"the thing has {len(expected)} faults:\n  - ").split("\n  - ") == expected


@holds("All that is wrong with a")
def test_of_very_many_faults_the_first_are_listed() -> None:
    given = {f"key{number}": 1 for number in range(100)}
    with pytest.raises(ValidationError) as refusal:
        Sizes.model_validate(given)
    *_, last = lines = every_sentence(refusal.value.errors(), "the thing", Sizes, given).splitlines()
    assert (len(lines), last) == (1 + MOST_FAULTS + 1, "  - … and 80 more")


@pytest.mark.parametrize("value", [1, "1"])
def test_of_as_many_faults_as_a_body_has_room_for_only_the_first_are_looked_at(value: object) -> None:
    """Each takes a look at the whole document: it took the controller 20 seconds, in which it did nothing else."""
    given = {f"key{number}": value for number in range(20_000)}
    with pytest.raises(ValidationError) as refusal:
        Sizes.model_validate(given)
    began = time.process_time()
    *_, last = lines = every_sentence(refusal.value.errors(), "the thing", Sizes, given).splitlines()
    assert time.process_time() - began < 10
    assert (len(lines), last) == (1 + MOST_FAULTS + 1, "  - … and 19980 more")


def test_the_values_under_a_long_name_do_not_each_cost_a_copy_of_it() -> None:
    given = {"job": "j", "n" * 50_000: [0] * 2_000}
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            JobBody.model_validate(given)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_of_a_long_value_only_the_beginning_is_written() -> None:
    written = []

    class Part:
        def __repr__(self) -> str:
            written.append(self)
            return "x" * 30

    assert len(shown([Part() for _ in range(1000)])) == LONGEST_SHOWN
    assert len(written) < 5


def test_of_a_long_name_the_beginning_is_written_and_that_it_goes_on() -> None:
    assert shown_name("n" * 4000) == "n" * (LONGEST_SHOWN - 2) + "…"
    assert (shown_name('w"0"'), shown_name("a\x1b[2J")) == (r"w\"0\"", r"a\u001b[2J")


def test_a_value_that_contains_itself_is_shown() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert shown(endless) == '"[[...]]"'


class Container(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    env: Annotated[dict[str, str], Unshown()] = {}
    port: int = 0


class Pod(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    container: Container


@holds("All that is wrong with a")
@pytest.mark.parametrize(
    "given",
    [
        {"env": {"TOKEN": ["s3cret"]}},
        {"env": "s3cret"},
        {"envs": {"TOKEN": "s3cret"}},
        {"TOKEN": "s3cret", "port": "x"},
        ["s3cret"],
    ],
)
def test_a_value_that_may_be_a_secret_is_never_repeated(given: object) -> None:
    """Under its key, under one that is misspelt, and where the whole is of another type."""
    with pytest.raises(ValidationError) as refusal:
        Pod.model_validate({"container": given})
    shown_to_all = every_sentence(refusal.value.errors(), "the pod", Pod, {"container": given})
    assert "`container" in shown_to_all and "s3cret" not in shown_to_all
    with pytest.raises(ValidationError) as refusal:
        Pod.model_validate({"container": {"prot": 7}})
    assert "(given: 7)" in every_sentence(refusal.value.errors(), "the pod", Pod), "a number is no secret"


def test_half_of_a_surrogate_pair_is_shown_escaped_for_no_answer_can_hold_it() -> None:
    assert shown({"a\ud800": ["\udfff", "é"]}) == '{"a\\ud800": ["\\udfff", "é"]}'
