"""The words of a command line: options, settings, positional arguments and overrides."""

from pathlib import Path

import pytest

from ringmaster_dist.cli.parser import Parser, number, several, whole
from ringmaster_dist.config.errors import UserError


@pytest.fixture
def parser():
    parser = Parser(
        "play",
        """ringmaster play RUN_DIR [options]

    Plays.
    """,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.option("--text TEXT", "what to say", short="-t")
    parser.option("--rows N", "how many", whole(1), 5)
    parser.switch("--loud", "-l", help="more of it")
    parser.setting("port=N", "where", whole(0, 9), 0)
    parser.setting("rates=A,B", "how fast", several(number(0)))
    return parser


def test_options_settings_and_overrides_may_be_mixed(parser):
    words = ["--rows", "3", "port=7", "runs/x", "a=1", "+b=2", "~c", "-l", "rates=1,2.5", "-t", "-5 port=3", "d=4"]
    arguments, overrides = parser.read(words, takes_overrides=True)
    assert overrides == ["a=1", "+b=2", "~c", "d=4"]
    assert (arguments.run_dir, arguments.rows, arguments.port) == (Path("runs/x"), 3, 7)
    assert (arguments.rates, arguments.loud, arguments.text) == ([1.0, 2.5], True, "-5 port=3")


def test_a_path_may_contain_an_equals_sign(parser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parser.read(["runs/eta=1"], takes_overrides=False)[0].run_dir == Path("runs/eta=1")
    Path("eta=1").mkdir()
    assert parser.read(["eta=1"], takes_overrides=False)[0].run_dir == Path("eta=1")


def test_what_is_not_given_has_its_default(parser):
    arguments, overrides = parser.read(["port"], takes_overrides=False)  # a setting has a value, this is a directory
    assert (arguments.run_dir, arguments.rows, arguments.port, overrides) == (Path("port"), 5, 0, [])
    assert (arguments.rates, arguments.loud, arguments.text) == (None, False, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: RUN_DIR; usage: ringmaster play RUN_DIR [options]"),
        (["--loudd"], "there is no option --loudd; did you mean --loud? known: --text, --rows, --help, --loud; see"),
        (["x", "--rows"], "--rows: expected one argument; usage: ringmaster play"),
        (["x", "--rows", "0"], "--rows=0: must be a whole number of at least 1"),
        (["x", "--rows=1.5"], "--rows=1.5: must be a whole number of at least 1"),
        (["x", "port=10"], "port=10: must be a whole number of at least 0 and at most 9"),
        (["x", "rates=1,nan"], "rates=1,nan: must be a number of at least 0"),
        (["x", "prt=1"], "there is no setting prt=; did you mean port=? known: port=, rates=, --text, --rows; see"),
        (["prt=1"], "there is no setting prt=; did you mean port=? known: port="),
        (["x", "method.eta=1"], "there is no setting method.eta=; known: port="),
        (["x", "rows=1"], "there is no setting rows=; did you mean --rows? known: port="),
        (["x", "y"], "'y' is one argument too many; usage: ringmaster play"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(parser, words, message):
    with pytest.raises(UserError) as caught:
        parser.read(words, takes_overrides=False)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_help_text_shows_words_as_they_are_written(parser):
    text = parser.format_help()
    assert text.startswith("ringmaster play RUN_DIR [options]\n\nPlays.\n")
    for words in ("port=N", "rates=A,B", "--rows N", "how many (default: 5)", "--loud, -l"):
        assert words in text
