"""The rules of the house that no linter knows: sizes, purity, names that are frozen, nothing that belongs elsewhere.

Everything here is read from the sources, nothing is imported (but for the command's flags). A rule that is broken
names the place and the figure. What is exempt is in a named list below, so that an exemption is seen in review.
"""

from __future__ import annotations

import ast
import gc
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import grimp
import pytest

pytestmark = pytest.mark.xdist_group("the house")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"shoal_controller": "controller", "shoal": "worker", "shoal_protos": "protos"}
FOLDERS = ("controller", "worker", "protos", "tests", "docs", "benchmarks", "examples", "helm")

LONGEST_FUNCTION = 70
LONGEST_FILE = 500
MOST_PARAMETERS = 6
MOST_METHODS = 28
MORE_METHODS = {"Engine": 32}
"""Of the one class that scripts see, each method is a public name, which hands on to a part."""

ENTRY_MODULES = {
    "shoal_controller.cli.console": "the console script",
    "shoal.deepspeed.env_report": "DeepSpeed's `ds_report`, `python -m`",
    "shoal.demo.byte_gpt": "the demo's script, `python -m`",
    "shoal.integrations.trl": "the door for TRL, imported by scripts",
    "shoal.process.warm": "what the local launcher starts, `python -c`",
}
"""Modules that nobody imports because they are started."""
NOT_USED_YET = {}
"""Modules that are there, with their tests, before what they are for."""

NO_IO = {"asyncio", "os", "random", "secrets", "socket", "sqlite3", "subprocess", "threading", "time"}
PURE_VOCABULARY = {
    f"shoal_protos.{name}"
    for name in (
        "activity",
        "acts",
        "addresses",
        "checkpoint",
        "corruption",
        "description",
        "error_codes",
        "errors",
        "gpu",
        "memory_estimate",
        "messages",
        "path_part",
        "plan",
        "runs",
        "shape",
        "text",
    )
}

SHARED_CLASS_NAMES = {
    "Client": "of the command; of programs, which have no controller's code",
    "Cell": "a section of the configuration; what a script knows of its own",
    "Change": "of a key in the store; of the world, as a worker reports it",
    "Compacted": "of the store; of etcd's client, which knows nothing of it",
    "Dialogue": "the two ends of a session",
    "Entry": "of the store; of a layout in a manifest",
    "JobInfo": "of the client; of a worker's session",
    "Process": "as its launcher sees it; as its job does",
    "Request": "of a script to a vote; of a worker to its controller",
    "TensorBoard": "a section of the configuration; a callback",
    "Resize": "in a job's history; a worker's part in it",
    "SessionSettings": "the two ends of a session",
    "Waiting": "what waits for a group's traffic; that a worker waits to start",
    "UnknownOutcome": "of the store; of etcd's client, which knows nothing of it",
}
"""Names that two public classes of the product have, each in a world of its own."""

SHARED_MODULE_NAMES = {
    "corruption": "the vocabulary; the phase that decides by it",
    "dialogue": "the two ends of a session",
    "errors": "of all; of checkpoints; of etcd",
    "rendezvous": "the form of the bytes there; its two ends in a worker",
    "settings": "of the controller, of its sessions, of a worker's",
    "utils": "two of DeepSpeed's, by its names",
}
NAMED_AFTER_OTHERS = ("cli", "wire")
"""Rooms whose modules are named after the command, or the vocabulary, that each of them serves."""

EMPTY_NAMES = {"heard", "said", "things", "told", "what"}
"""Names that say nothing of what they stand for."""

STAGE = re.compile(r"(.+\.)?(stage|residency)|Residency")
KNOW_STAGES = ("worker/shoal/config/", "worker/shoal/deepspeed/", "worker/shoal/integrations/", "worker/shoal/doctor/")
"""Rooms that read or print what a user asks for; `residency.py` builds what differs by it."""
VERB = re.compile(r"\bConfirmLost\b|\bAct\.LOST\b|\bconfirm_lost\b|/lost\b|\blost\s*[:=].*(workers|label)")
"""One verb of an operator, as its request, act, path and button spell it."""
LAUNCHER = re.compile(r"launcher.*[\"'](none|local|kubernetes)[\"']|[\"'](none|local|kubernetes)[\"'].*launcher")

READ_SHARES = (
    "protos/shoal_protos/plan.py",
    "protos/shoal_protos/wire/plan.py",
    "controller/shoal_controller/core/planning",
)
"""Where it matters how a plan says who trains which lane and has which blocks."""

WITH_SHAPES = ("worker/shoal/blocks", "worker/shoal/exchange")
"""Rooms in which every tensor has its shape beside it."""
TENSORS = re.compile(r"\b(Tensor|Flats|Gradients|State)\b")

AGAINST_FOREIGN_CODE = {
    "tests/integration/test_right_bits.py",
    "tests/models/test_trainer.py",
    "tests/models/test_trainer_parts.py",
    "tests/unit/test_turns.py",
}
"""Test files that compare Shoal with code that is not ours, where equal bits cannot be asked for."""

SHOAL_PUBLIC = [
    "Engine", "JobFailed", "PeerError", "ShoalError", "UserError",
    "cell", "common", "deferred", "initialize", "sharded", "tied",
]  # fmt: skip


@cache
def sources() -> dict[Path, ast.Module]:
    """Every Python file of the repository but generated ones, parsed."""
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    with _uncollected():
        return {
            file.relative_to(ROOT): ast.parse(file.read_text(), str(file))
            for file in sorted(files)
            if "_pb2" not in file.name
        }


@cache
def nodes() -> dict[Path, tuple[ast.AST, ...]]:
    """All nodes of each of them, breadth first."""
    with _uncollected():
        return {file: tuple(ast.walk(tree)) for file, tree in sources().items()}


@contextmanager
def _uncollected() -> Iterator[None]:
    """Millions of nodes are made here that stay: no collection, now or later in this process, has to look at them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def modules() -> dict[str, Path]:
    """The modules of the three packages by their dotted names, `__init__` files left out."""
    named = {}
    for file in sources():
        package = next((name for name, folder in PACKAGES.items() if file.parts[:2] == (folder, name)), None)
        if package and file.name != "__init__.py":
            named[".".join(file.with_suffix("").parts[1:])] = file
    return named


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, inside in nodes().items():
        for node in inside:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node


def imported(tree: ast.Module) -> set[str]:
    """The dotted names that a file imports, `from a import b` as both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def declares_flags(file: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the function is a command of `shoal`, whose parameters are its flags."""
    return file.parts[:3] == ("controller", "shoal_controller", "cli") and function.name == file.stem


def test_no_function_is_longer_than_one_can_keep_in_mind() -> None:
    lengths = {f"{file}:{f.lineno} {f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for file, f in functions()}
    assert {place: lines for place, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_no_file_is_longer_than_one_can_read_at_once() -> None:
    lengths = {str(file): len((ROOT / file).read_text().splitlines()) for file in sources()}
    assert {file: lines for file, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_no_function_takes_more_parameters_than_one_can_remember() -> None:
    many = {}
    for file, function in functions():
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        count = len([parameter for parameter in given if parameter.arg not in ("self", "cls")])
        if count > MOST_PARAMETERS and not declares_flags(file, function):
            many[f"{file}:{function.lineno} {function.name}"] = count
    assert many == {}


def test_no_class_has_more_methods_than_one_can_survey() -> None:
    many = {}
    for file, inside in nodes().items():
        for node in inside:
            if isinstance(node, ast.ClassDef) and file.parts[0] != "tests":
                count = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
                if count > MORE_METHODS.get(node.name, MOST_METHODS):
                    many[f"{file}:{node.lineno} {node.name}"] = count
    assert many == {}


def test_every_module_introduces_itself() -> None:
    silent = [str(file) for file, tree in sources().items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def test_every_module_is_imported_by_another_or_is_a_named_entry() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    outside = [name for name in modules() if name not in graph.modules]
    assert outside == [], "these lie in folders that are no packages"
    lonely = {name for name in modules() if not graph.find_modules_that_directly_import(name)}
    lonely -= {name for name in lonely if name.endswith("__main__")}
    assert sorted(lonely - set(ENTRY_MODULES) - set(NOT_USED_YET)) == []
    assert sorted((set(ENTRY_MODULES) | set(NOT_USED_YET)) - lonely) == []


def test_no_two_public_classes_of_the_product_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in sources()[file].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    assert {name: where for name, where in found.items() if len(where) > 1 and name not in SHARED_CLASS_NAMES} == {}


def test_no_two_modules_of_the_product_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for name in modules():
        *rooms, last = name.split(".")
        if not set(NAMED_AFTER_OTHERS) & set(rooms) and last != "__main__":
            found.setdefault(last, []).append(name)
    assert {name: where for name, where in found.items() if len(where) > 1 and name not in SHARED_MODULE_NAMES} == {}


def test_no_name_leaves_open_what_it_names() -> None:
    fields: dict[type[ast.AST], str] = {ast.arg: "arg", ast.Attribute: "attr", ast.Name: "id"}
    fields |= dict.fromkeys((ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef), "name")
    named = [(file, node) for file, inside in nodes().items() for node in inside if type(node) in fields]
    assert [
        f"{file}:{node.lineno}"
        for file, node in named
        if getattr(node, fields[type(node)]).strip("_").removeprefix("on_") in EMPTY_NAMES
    ] == []


def test_zeros_stage_is_asked_for_where_its_parts_are_built() -> None:
    asked = [
        f"{file}:{node.lineno}"
        for file, inside in nodes().items()
        if str(file).startswith("worker/") and not str(file).startswith(KNOW_STAGES) and file.name != "residency.py"
        for node in inside
        if isinstance(node, ast.Attribute | ast.Name) and STAGE.fullmatch(ast.unparse(node))
        if not (isinstance(node, ast.Name) and node.id != "Residency")
    ]
    assert len(asked) <= 4, asked


def test_a_verb_of_an_operator_is_spelled_in_few_files() -> None:
    page = [file for file in (ROOT / "controller").rglob("*.js") if "uPlot" not in file.name]
    product = [ROOT / file for file in sources() if file.parts[0] in PACKAGES.values()]
    spelled = [str(file.relative_to(ROOT)) for file in (*product, *page) if VERB.search(file.read_text())]
    assert 0 < len(spelled) <= 5, spelled


def test_the_controller_asks_for_a_launchers_traits_not_for_its_name() -> None:
    named = [
        f"{file}:{number}"
        for file in sources()
        if file.parts[0] == "controller" and not {"launchers", "cli"} & set(file.parts)
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if LAUNCHER.search(line)
    ]
    assert len(named) <= 2 and not [one for one in named if "/core/" in one], named


def test_files_are_neither_slices_nor_heaps() -> None:
    lines = [len((ROOT / file).read_text().splitlines()) for file in sources() if file.parts[0] in PACKAGES.values()]
    assert 110 <= statistics.median(lines) <= 200


def test_the_shares_of_a_plan_are_read_by_the_plan_and_the_planner_all_others_ask() -> None:
    readers = {
        str(file)
        for file, inside in nodes().items()
        for node in inside
        if file.parts[0] in PACKAGES.values() and isinstance(node, ast.Attribute) and node.attr == "shares"
    }
    assert [file for file in readers if not file.startswith(READ_SHARES)] == []


def test_every_tensor_that_is_passed_has_its_shape_beside_it() -> None:
    bare = []
    for file, function in functions():
        if str(file).startswith(WITH_SHAPES):
            lines = (ROOT / file).read_text().splitlines()
            given = [one.annotation for one in (*function.args.args, *function.args.kwonlyargs) if one.arg != "_"]
            tensors = [one for one in (*given, function.returns) if one and TENSORS.search(ast.unparse(one))]
            ends = [one.end_lineno or one.lineno for one in tensors]
            bare += [f"{file}:{end} {function.name}" for end in ends if "#" not in lines[end - 1]]
    assert bare == []


def test_letters_for_dimensions_have_a_legend_in_their_file() -> None:
    shapes = re.compile(r"# \(((?:[\w ]+(?:, ?|(?=\))))+)\)")
    unexplained = []
    for file in modules().values():
        text = (ROOT / file).read_text()
        letters = {one.strip() for shape in shapes.findall(text) for one in shape.split(",") if len(one.strip()) == 1}
        legend = "".join(re.findall(r"Legend of shapes: (.*)", text))
        unexplained += [f"{file}: {one}" for one in sorted(letters) if not re.search(rf"\b{one} ", legend)]
    assert unexplained == []


QUESTION = re.compile(r"_?(is|has|have|are|can|may|might|could)_")
CHANGES = {
    *("add", "append", "change", "clear", "count", "discard", "do", "drop", "enlist", "enter", "extend", "insert"),
    *("keep", "mark", "note", "observe", "pop", "put", "remove", "say", "see", "setdefault", "update"),
}
"""Methods that change what they are called on: of collections, and of a `Turn`."""


def test_a_question_never_acts() -> None:
    acting = []
    for file in modules().values():
        for node in nodes()[file]:
            if isinstance(node, ast.FunctionDef) and QUESTION.match(node.name):
                given = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
                acting += [f"{file}:{line} {node.name}" for line in changes_of(node, given)]
    assert acting == []


def changes_of(function: ast.FunctionDef, given: set[str]) -> Iterator[int]:
    """Lines in which something that the function was given is changed."""
    for node in ast.walk(function):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.AugAssign):
            changed = node.targets if isinstance(node, ast.Assign) else [node.target]
            changed = [one for one in changed if not isinstance(one, ast.Name)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            changed = [node.func]
        for one in changed:
            while isinstance(one, ast.Attribute | ast.Subscript):
                one = one.value
            if isinstance(one, ast.Name) and one.id in given:
                yield node.lineno


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_the_pure_vocabulary_and_the_controllers_core_use_the_standard_library_only() -> None:
    assert foreign_imports("shoal_controller.core", sys.stdlib_module_names - NO_IO) == {}


def test_the_workers_core_uses_the_standard_library_numpy_and_torch_only() -> None:
    assert foreign_imports("shoal.core", (sys.stdlib_module_names - NO_IO) | {"numpy", "pydantic", "torch"}) == {}


def foreign_imports(room: str, libraries: frozenset[str] | set[str]) -> dict[str, set[str]]:
    """What the pure modules of a room (and the vocabulary) import beyond themselves and these libraries."""
    foreign = {}
    for name, file in modules().items():
        if name in PURE_VOCABULARY or name.startswith(f"{room}."):
            beyond = {used for used in imported(sources()[file]) if used.partition(".")[0] not in libraries}
            beyond = {used for used in beyond if not is_pure(used, room)}
            if beyond:
                foreign[name] = beyond
    return foreign


def is_pure(used: str, room: str) -> bool:
    """Whether an imported name is of the room, or of the vocabulary (a module, or something in one)."""
    module, _, _ = used.rpartition(".")
    inside = f"{used}.".startswith(f"{room}.")
    return inside or used in PURE_VOCABULARY or module in PURE_VOCABULARY


def calls(name: str, of: str | None = None) -> list[str]:
    """Where something of that name (an attribute of `of`, where given) is named in code."""
    places = []
    for file, inside in nodes().items():
        for node in inside:
            if isinstance(node, ast.Attribute) and node.attr == name:
                if of is None or (isinstance(node.value, ast.Name) and node.value.id == of):
                    places.append(f"{file}:{node.lineno}")
            elif isinstance(node, ast.Name) and node.id == name and of is None:
                places.append(f"{file}:{node.lineno}")
    return places


def test_bits_are_compared_with_a_tolerance_only_against_foreign_code() -> None:
    tolerant = calls("assert_close") + calls("allclose")
    assert [place for place in tolerant if place.partition(":")[0] not in AGAINST_FOREIGN_CODE] == []


def test_no_test_sleeps_where_it_could_wait_for_something() -> None:
    assert [place for place in calls("sleep", of="time") if place.startswith("tests/")] == []


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    machine = re.compile(r"(?<![\w.$}])/(?:work|root|opt|home/\w+|Users/\w+)/[\w.]|file:///\w")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        if name != "LICENSE" and (ROOT / name).exists() and not name.endswith((".gz", ".png", ".svg")):
            lines = (ROOT / name).read_text().splitlines()
            found += [f"{name}:{number}" for number, line in enumerate(lines, 1) if machine.search(line)]
    assert found == []


def test_the_public_names_of_shoal_are_these() -> None:
    tree = ast.parse((ROOT / "worker/shoal/__init__.py").read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert [sorted(ast.literal_eval(names)) for names in lists] == [SHOAL_PUBLIC]
