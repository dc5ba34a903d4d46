"""Every command in the documents is understood by the program and run by a test, or says why it cannot be.

A command of a ``sh`` block or of a code span is read by the real parser, and its overrides are composed and checked.
Every ``ringmaster NAME`` that a document mentions is also run by some test. A script or another program has an entry in
``RUN_BY``, or its block has the line ``<!-- not run: REASON -->`` above it.
"""

import importlib
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from ringmaster_dist.bench import BENCHES
from ringmaster_dist.cli.main import COMMANDS
from ringmaster_dist.cli.parser import Parser
from ringmaster_dist.config.compose import compose, expand, load, to_typed
from ringmaster_dist.config.errors import UserError
from tests.syntax import parsed

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
BY_NAME = {command.name: command for command in COMMANDS}

RUN_BY = {
    "launch/server.sh": "tests/e2e/test_netns.py::test_the_scripts_of_two_machines",
    "launch/worker.sh": "tests/e2e/test_netns.py::test_the_scripts_of_two_machines",
    "launch/local.sh": "tests/e2e/test_command.py::test_nanochat_from_training_to_text",  # the command that it calls
    "docker/up.sh": "tests/e2e/test_docker.py::test_a_cluster_survives_lost_workers_and_a_lost_server_and_replays",
    "mkdocs": "tests/unit/test_site.py::test_the_reference_has_every_key_and_every_command",
}
NEEDS_NO_TEST = {"launch/test.sh", "source"}  # the command that runs the tests, and the shell's own

_BLOCK = re.compile(r"^(?:<!-- not run: (.+?) -->\n+)?```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_STARTS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:ringmaster |torchrun |python -m ringmaster|\S*launch/\w+\.\w+ |sbatch )")
_PLACEHOLDERS = {"HOST:PORT": "10.0.0.1:29400", "HOST": "10.0.0.1", "PORT": "29400", "N": "4", "G": "4"}


def commands_of(line):
    """Returns the commands of a line as lists of words, without variables that are set for them."""
    line = re.sub(r"\$\([^)]*address\)", "10.0.0.1:29400", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    found = [[]]
    for word in lexer:
        if set(word) <= set("&|;"):
            found.append([])
        elif found[-1] or not re.match(r"[A-Z_]+=", word):
            found[-1].append(word)
    return [words for words in found if words]


def blocks(document):
    """Yields each command of the sh blocks, and the reason why its block is not run, if it has one."""
    for reason, code in _BLOCK.findall(document.read_text()):
        for line in code.replace("\\\n", " ").splitlines():
            for words in commands_of(line):
                yield words, reason


def spans(document):
    """Yields the commands of code spans, which may leave out arguments or have ``...`` for them."""
    for span in _SPAN.findall(_FENCE.sub("", document.read_text())):
        if _STARTS.match(span) and "ringmaster COMMAND" not in span:
            for words in commands_of(span.replace("\n", " ")):
                yield [word for word in words if word != "..." and not word.endswith("=")]


def for_ringmaster(words):
    """Returns the words of the ringmaster command that a command line leads to, or None if there is none."""
    program, arguments = words[0].removeprefix("./"), words[1:]
    if program == "sbatch":
        program, arguments = arguments[0], arguments[1:]
    if program == "ringmaster":
        return arguments
    if program in ("torchrun", "python") and "-m" in words:
        name, *rest = words[words.index("-m") + 1 :]
        return [name.removeprefix("ringmaster_dist."), *rest] if name.startswith("ringmaster_dist.") else None
    if program == "launch/local.sh":
        return ["train", "experiment=nanochat_local", *arguments]
    if program in ("launch/server.sh", "launch/slurm.sbatch") and arguments != ["--help"]:
        return ["train", "cluster.local_workers=0", "cluster.profile=none", "server.host=10.0.0.1", *arguments]
    if program == "launch/worker.sh" and arguments and arguments != ["--help"]:
        return ["worker", f"server={arguments[0]}", *arguments[1:]]
    return None


def filled(word):
    """Returns a word with values in place of capitals such as HOST:PORT."""
    key, equals, value = word.rpartition("=")
    return key + equals + _PLACEHOLDERS.get(value, value)


def understand(words, *, is_whole):
    """Raises UserError if the program would refuse this command line."""
    name, *rest = map(filled, words)
    if name not in BY_NAME:
        raise UserError(f"there is no command {name}")
    command = BY_NAME[name]
    module = importlib.import_module(f"ringmaster_dist.cli.{command.module}")
    parser = Parser(name, getattr(module, f"run_{name}").__doc__)
    getattr(module, f"{name}_options")(parser)
    if "--help" in rest:
        return
    try:
        arguments, overrides = parser.read(rest, takes_overrides=command.overrides)
    except UserError as error:
        excuses = ("has no device",) if is_whole else ("has no device", "arguments are required")
        if not any(excuse in str(error) for excuse in excuses):
            raise
        return
    if name == "bench":
        assert set(arguments.names) <= {*BENCHES, "NAME"}
    for combination in expand(overrides) if getattr(arguments, "multirun", False) else [overrides]:
        check(name, tuple(combination))


@cache
def check(name, overrides):
    """Composes and validates the overrides of a command as the command does."""
    words = [word for word in overrides if not word.startswith(("resume=runs/", "resume=s3:"))]
    if name in ("train", "chaos"):
        to_typed(compose(words, "train"), real_time=True)
    elif name in ("data", "profile"):
        load(words if any("problem=" in word for word in words) else ["problem=nanochat", *words])
    elif words:
        load(words)


@pytest.fixture(autouse=True)
def files_that_commands_read(tmp_path, monkeypatch):
    for name in ("mine", "all", "cluster"):
        devices = {"devices": [{"seconds_mean": 1.0}, {"seconds_mean": 3.0}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(devices))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_commands_are_understood(document):
    wrong = []
    whole = [(words, True) for words, _ in blocks(document)]
    for words, is_whole in whole + [(words, False) for words in spans(document)]:
        called = for_ringmaster(words)
        try:
            if called:
                understand(called, is_whole=is_whole)
        except UserError as error:
            wrong.append(f"{shlex.join(words)}: {error}")
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_other_programs_are_run_by_a_test_or_say_why_not(document):
    known = {*RUN_BY, *NEEDS_NO_TEST}
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    unaccounted = []
    for words, reason in blocks(document):
        program = words[0].removeprefix("./")
        if reason or program in known or for_ringmaster(words):
            continue
        is_extra = re.fullmatch(r"(?:ringmaster-dist|\.)\[(\w+)\]", words[-1])
        if words[:2] == ["pip", "install"] and is_extra and f"\n{is_extra[1]} = [" in extras:
            continue
        unaccounted.append(shlex.join(words))
    assert unaccounted == []


def test_every_documented_command_is_run_by_some_test():
    tests = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")))
    named = set()
    for document in DOCUMENTS:
        for words in [*(words for words, _ in blocks(document)), *spans(document)]:
            named |= {(for_ringmaster(words) or [None])[0]}
    starts = r"(?:\w\((?:\w+, )?\[?|= \[|\"ringmaster_dist\", )\s*\""  # a call, or a list of words
    modules = r"\"ringmaster_dist\."
    missing = [name for name in named & set(BY_NAME) if not re.search(rf"(?:{starts}|{modules}){name}\"", tests)]
    assert missing == []
    assert len(named) > 15


def test_the_tests_that_run_scripts_exist():
    for program, test in RUN_BY.items():
        path, _, name = test.partition("::")
        assert name in {getattr(node, "name", "") for node in parsed((ROOT / path).read_text()).body}, program


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("ringmaster train clutser.workers=8", "cluster"),
        ("ringmaster train method.eta=-1", "above 0"),
        ("ringmaster simulate -m method=ringmaster,renala", "rennala"),
        ("torchrun --standalone -m ringmaster_dist.train budget.updatess=3", "budget.updates"),
        ("RUN_DIR=a launch/server.sh budget.update=1", "budget.updates"),
        ("ringmaster replay", "required"),
        ("cd x && ringmaster evl runs/a", "no command"),
    ],
)
def test_a_mistake_in_a_document_is_found(line, complaint):
    found = [for_ringmaster(words) for words in commands_of(line)]
    with pytest.raises(UserError, match=complaint):
        understand(found[-1], is_whole=True)
