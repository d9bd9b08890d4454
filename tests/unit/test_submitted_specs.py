"""A job's specification as `shoal submit` reads it from a file, and what it says of a file that holds none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from shoal_controller.cli.submit import read_spec
from shoal_protos.errors import UserError


@pytest.mark.parametrize("text", ['{"job": "j", "workers": {"wanted": 2}}', "job: j\nworkers:\n  wanted: 2\n"])
def test_a_job_spec_is_read_from_json_and_yaml(text: str, tmp_path: Path) -> None:
    file = tmp_path / ("job.json" if text.startswith("{") else "job.yaml")
    file.write_text(text)
    assert read_spec(file) == {"job": "j", "workers": {"wanted": 2}}


@pytest.mark.parametrize("name", ["job.json", "job.yaml"])
def test_a_job_spec_may_begin_with_a_byte_order_mark(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"job": "j"}', encoding="utf-8-sig")
    assert read_spec(tmp_path / name) == {"job": "j"}


def test_a_job_spec_in_another_encoding_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("job: café", encoding="latin-1")
    with pytest.raises(UserError) as refused:
        read_spec(tmp_path / "job.yaml")
    assert str(refused.value) == f"{tmp_path / 'job.yaml'} cannot be read as a job spec: it is not text in UTF-8"


def test_a_resource_is_no_job_spec_and_the_command_that_takes_it_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "job.yaml").write_text("apiVersion: shoal.dev/v1alpha1\nkind: ElasticJob\nspec: {}\n")
    with pytest.raises(UserError, match=f"not a job spec; submit it with `kubectl apply --filename {file}`"):
        read_spec(file)


@pytest.mark.parametrize("text", ["[1]", "", "a: b: c", "\x00"])
def test_a_file_that_is_no_job_spec_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError, match="job spec"):
        read_spec(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("job: 2024-01-01", "`job` is read as a date; put it in quotes to give it as text"),
        ("job: j\ncommand: [a, !!binary aGk=]", "`command[1]` is read as a bytes; put it in quotes to give it as text"),
        ("job: j\nworkers: {wanted: .inf}", "`workers.wanted` is inf; expected a finite number"),
        ("job: j\nenv: &env {A: *env}", "`env.A` holds itself"),
        (f"job: j\nlanes: 0x{'f' * 5000}", "`lanes` is a number of more than 64 bits"),
        ("job: j\n2024-01-01: 1", "the key `2024-01-01` is no text; put it in quotes"),
    ],
)
def test_what_yaml_can_say_and_json_cannot_is_refused_by_its_key(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_spec(file)
    assert str(refused.value) == f"{file} cannot be sent as a job spec: {sentence}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.json", '{"job": "j", "workers": {"wanted": 2, "wanted": 3}}'),
        ("job.yaml", "job: j\nworkers:\n  wanted: 2\n  'wanted': 3\n"),
    ],
)
def test_a_key_that_a_job_spec_gives_twice_is_refused_by_its_name(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refused:
        read_spec(tmp_path / name)
    assert str(refused.value) == (
        f"{tmp_path / name} cannot be read as a job spec: `wanted` is given twice in one section of the file; keep one"
    )


def test_a_key_beside_the_same_one_that_is_merged_counts_as_yaml_has_it(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("job: j\nenv: &env {A: a}\nkubernetes: &more {<<: *env, A: b}\nworkers: {<<: *more, A: c}\n")
    assert read_spec(file) == {"job": "j", "env": {"A": "a"}, "kubernetes": {"A": "b"}, "workers": {"A": "c"}}


@pytest.mark.parametrize("name", ["job.json", "job.yaml"])
def test_a_job_spec_that_is_nested_without_end_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(UserError) as refused:
        read_spec(tmp_path / name)
    assert str(refused.value).endswith("cannot be read as a job spec: the file is nested too deeply")


LAUGHS = "job: j\nl0: &l0 [x, x]\n" + "".join(f"l{n}: &l{n} [{f'*l{n - 1}, ' * 10}]\n" for n in range(1, 12))
MERGED = "job: j\nl0: &l0 {x: x}\n" + "".join(
    f"l{n}: &l{n} {{<<: [{f'*l{n - 1}, ' * 10}], k{n}: x}}\n" for n in range(1, 12)
)
LONG = f"job: j\ntext: &text {'x' * 100_000}\ncommand: [{'*text, ' * 20_000}]\n"
COMMENTS = "job: j\n" + "# nothing\n" * 30_000
LIMIT = "it is larger than 262144 bytes, the most that a controller accepts"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LAUGHS, f"{LIMIT}, with all that its aliases repeat"),
        (MERGED, f"{LIMIT}, with all that its aliases repeat"),
        (LONG, f"{LIMIT}, with all that its aliases repeat"),
        (COMMENTS, LIMIT),
    ],
    ids=["lists", "merged", "long text", "comments"],
)
def test_a_file_that_would_become_too_large_is_refused_before_it_does(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        read_spec(tmp_path / "job.yaml")
    assert str(refused.value) == f"{tmp_path / 'job.yaml'} cannot be read as a job spec: {sentence}"


def test_a_file_of_very_many_keys_is_read_in_time_that_grows_with_it(tmp_path: Path) -> None:
    names = [f"k{n}" for n in range(20_000)]
    (tmp_path / "job.yaml").write_text(f"job: j\nenv: {{{': x, '.join(names)}: x}}\n")
    began = time.process_time()
    assert read_spec(tmp_path / "job.yaml") == {"job": "j", "env": dict.fromkeys(names, "x")}
    assert time.process_time() - began < 10
