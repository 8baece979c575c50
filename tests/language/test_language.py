"""The language rules hold everywhere, and the check finds violations."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

from language.passages import ROOT, Passage, _python_comments, files, names_of, nodes_of, passages_of
from language.rules import ADVICE, all_findings, findings_of, rules, sentences_of, wrong_name

PYTHON = '''"""Nobody reads this."""

TURNS = 3  # somebody said "#1"
"""Of whoever waits."""
URL = "http://example.org/#who"


def read(text: str) -> None:
    """Read a text.

        who = is_an_example_of_code()

    Somebody else's text.
    """
    _log.warning(f"anyone {text}", extra={"who": text})
    raise RequestError("everyone " "waits")
'''
PAGE = """# Nobody

A paragraph of two
lines for someone.

```
who am i
```

- `nobody` is a name
| cell of everybody | [somebody](who.md) |
"""
LUA = 'local x = 1 -- nobody\n-- two lines\n-- of somebody\nlocal y = "who -- am"\n'
CPP = '// whoever\nint a = 1;  // someone\n/* anybody */\nconst char* url = "http://who";\n'


def said_in(folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    """Line and word of each pronoun that is found in such a file."""
    path = folder / name
    path.write_text(text)
    found = [Passage(ROOT / name, one.line, one.text) for one in passages_of(path)]
    return sorted((one.passage.line, one.said) for text in found for one in findings_of(text, rules()))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.py",
            PYTHON,
            [(1, "Nobody"), (3, "somebody"), (4, "whoever"), (13, "Somebody"), (15, "anyone"), (16, "everyone")],
        ),
        ("a.md", PAGE, [(1, "Nobody"), (3, "someone"), (11, "everybody"), (11, "somebody")]),
        ("a.lua", LUA, [(1, "nobody"), (2, "somebody")]),
        ("a.cpp", CPP, [(1, "whoever"), (2, "someone"), (3, "anybody")]),
    ],
)
def test_prose_is_read_and_code_is_not(tmp_path: Path, name: str, text: str, expected: list[tuple[int, str]]) -> None:
    assert said_in(tmp_path, name, text) == expected


def test_comments_are_those_that_the_tokenizer_finds() -> None:
    paths = [path for path in files() if path.suffix == ".py" and "engine" in path.parts][:60]
    assert len(paths) > 40
    for path in paths:
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        meant = [(one.start[0], one.string[1:]) for one in tokens if one.type == tokenize.COMMENT]
        assert [(line, said) for line, _, said in _python_comments(text, nodes_of(path))] == meant


def test_sentences_end_where_readers_see_their_end() -> None:
    text = "It takes 1.5 ms, e.g. on a CPU. See `a.b`! (Others wait.) One; behind it: more"
    assert [*sentences_of(text)] == [
        "It takes 1.5 ms, e.g. on a CPU.",
        "See `a.b`!",
        "(Others wait.)",
        "One;",
        "behind it: more",
    ]


@pytest.mark.parametrize(("num_words", "found"), [(30, []), (31, [ADVICE]), (40, [ADVICE]), (41, ["long"])])
def test_a_sentence_may_have_forty_words(num_words: int, found: list[str]) -> None:
    passage = Passage(ROOT / "a.md", 1, " ".join(["word"] * (num_words - 1)) + " `three words here`.")
    assert [one.rule for one in findings_of(passage, rules())] == found


@pytest.mark.parametrize("text", ["An operator who reads this.", "Any caller, who waits.", "A tenant who pays."])
def test_people_may_be_called_people(text: str) -> None:
    assert [*findings_of(Passage(ROOT / "a.md", 1, text), rules())] == []


@pytest.mark.parametrize(("text", "word"), [("A sequence who waits.", "who"), ("A behaviour.", "behaviour → -or")])
def test_pronouns_for_things_and_british_spelling_are_found(text: str, word: str) -> None:
    assert [one.said for one in findings_of(Passage(ROOT / "a.md", 1, text), rules())] == [word]


@pytest.mark.parametrize(("name", "is_wrong"), [("Courier", True), ("_bury", True), ("Couriers", False)])
def test_retired_names_are_found_as_whole_names(name: str, is_wrong: bool) -> None:
    assert bool([*wrong_name(Passage(ROOT / "a.py", 1, name), rules())]) == is_wrong


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", "class A:\n    def b(self, c, *, d=1): e = lambda f: g\n", {"A", "b", "self", "c", "d", "f"}),
        (
            "a.lua",
            "local function b(c, d)\n  local e, f = g(1)  -- for h in\n  for i, j in pairs(k) do\n",
            set("bcdefij"),
        ),
        ("a.js", "class A {\n  b(c, d) {\n    const e = f(g); // let h\n", {"A", "b", "c", "d", "e"}),
    ],
)
def test_names_are_those_that_a_source_defines(tmp_path: Path, name: str, text: str, expected: set[str]) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert {one.text for one in names_of(path)} == {"a", *expected}


def test_no_rule_is_broken() -> None:
    assert [str(one) for one in all_findings() if one.rule != ADVICE] == []
