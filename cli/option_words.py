"""The words of a command line before they are parsed: other servers' names become ours, and all unknown options are
refused at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import typer

from penstock.cli.output import write_line
from penstock.cli.peers import LEFT_OPEN, MANY, MODEL, PEERS, SAMPLING, VALUES, Peer

_TAKES_PEERS = ("serve", "node", "gateway")
_MANY = re.compile(r"[^-].*")
_PAIR = re.compile(r"\{.*|[^-][^=]*=.*", re.DOTALL)
_NUMBER = re.compile(r"-\d[\d.]*")
_MODEL_FLAGS = frozenset(name for name, peer in PEERS.items() if peer.flag == MODEL)
_PAIRS = frozenset(("lora",))
_API_KEY = "api_key"
SHOWS_ALL = "penstock.shows_all"
"""Set in a context whose help page shows hidden options too."""


class KnownWords:
    """The words of a command line with the names that the command has (`taken`), and what is wrong with them."""

    def __init__(self, ctx: Any, words: Sequence[str]) -> None:
        self._ctx = ctx
        self._rest = deque(words)
        options = [one for one in ctx.command.params if one.param_type_name == "option"]
        self._own = {name: one for one in options for name in (*one.opts, *one.secondary_opts)}
        self._takes_peers = ctx.info_name in _TAKES_PEERS
        self._takes_model = any(one.name == "model" for one in ctx.command.params)
        self._has_model = any(word.partition("=")[0] in _MODEL_FLAGS for word in words)
        self._models: list[str] = []
        self._file = ""
        # Of one user, or of our own code and files.
        self._sampling: dict[str, Any] = {}
        self._keys: list[str] = []
        self.taken: list[str] = []
        # Of one user, or of our own code and files.
        self.notices: dict[str, str] = {}
        """Option → why it has no effect."""
        # Of one user, or of our own code and files.
        self.problems: dict[str, str] = {}
        """Option → what to do instead; empty if nothing is known."""
        self.without_value: list[str] = []
        self._read()

    def wrong(self) -> list[str]:
        """Return a sentence about all unknown options, and one for each option that lacks its value."""
        unknown = [_in_words(self.problems)] if self.problems else []
        return unknown + [f"{name} needs a value" for name in self.without_value]

    def tell_notices(self) -> None:
        """Name the options without an effect here on stderr."""
        if self.notices:
            write_line(f"penstock: without effect: {_listed(self.notices.items())}", file=sys.stderr)

    def _read(self) -> None:
        while self._rest:
            word = self._rest.popleft()
            if word == "--":
                self.taken += [word, *self._rest]
                break
            if word == "-" or not word.startswith("-") or _NUMBER.fullmatch(word):
                self._has_model = True
                self.taken.append(word)
                continue
            name, sign, value = word.partition("=")
            self._option(word, _plain(name), value if sign else None)
        self._finish()

    def _option(self, word: str, name: str, value: str | None) -> None:
        if name in self._own and name not in ("-h", "--help"):
            self._take(name, value)
        elif self._takes_peers and (peer := _peer(name)) is not None:
            self._take_peer(name, peer, value)
        elif name in self._ctx.help_option_names or (not name.startswith("--") and name[:2] in self._own):
            self.taken.append(word)
        else:
            self._value(value, optional=True)
            self.problems[name] = self._meant(name)

    def _value(self, value: str | None, *, optional: bool = False) -> str | None:
        """Return the value of an option: the one after its `=`, or the next word; None if there is none."""
        if value is not None or not self._rest:
            return value
        following = self._rest[0]
        is_option = following.startswith("-") and not _NUMBER.fullmatch(following) and following != "-"
        return None if optional and is_option else self._rest.popleft()

    def _take(self, name: str, value: str | None) -> None:
        option = self._own[name]
        if option.is_flag:
            self.taken.append(name if value is None else f"{name}={value}")
            return
        given = self._value(value)
        if given is None:
            self.without_value.append(name)
            return
        for one in [given, *(self._further(name, option.name) if self._takes_peers else ())]:
            self._take_value(name, option.name, one)

    def _take_value(self, name: str, setting: str, value: str) -> None:
        if self._takes_peers and setting == _API_KEY:
            self._keys.append(value)
            return
        convert = VALUES.get(setting) if self._takes_peers else None
        found, notice = (value, "") if convert is None else convert(value)
        if notice:
            self.notices[f"{name} {value}"] = notice
        if found is not None:
            self.taken += [f"{name}={found}"] if name.startswith("--") else [name, found]

    def _further(self, name: str, setting: str) -> Iterable[str]:
        """Yield the further values of an option that takes several in other servers."""
        if setting not in MANY:
            return
        form = _PAIR if setting in _PAIRS else _MANY
        while self._rest and form.fullmatch(self._rest[0]):
            if form is _MANY and self._takes_model and not self._has_model:
                return  # It may be the model.
            yield self._rest.popleft()

    def _take_peer(self, name: str, peer: Peer, value: str | None) -> None:
        given = self._value(value, optional=peer.values != "one") if peer.values != "none" or value else None
        if name == "-fa" and given not in (None, "on", "off", "auto", "0", "1"):
            self._rest.appendleft(str(given))
        if peer.flag == MODEL and self._takes_model:
            self._take_model(name, given)
        elif name in SAMPLING:
            self._take_sampling(name, given)
        elif peer.words is not None:
            self._take_words(name, peer, given or "")
        elif peer.flag in self._own:
            option = self._own[peer.flag]
            if option.is_flag:
                self.taken.append(peer.flag)
            elif not (option.name in LEFT_OPEN and given in ("0", "-1")):
                self._take(peer.flag, given)
        elif peer.flag:
            self.problems[name] = self._of_other_command(peer.flag) or f"here it is {peer.flag}"
        elif peer.needless:
            self.notices[name] = peer.needless
        else:
            self.problems[name] = peer.instead

    def _take_model(self, name: str, given: str | None) -> None:
        if given is None:
            self.problems[name] = "it needs a value"
        elif name in ("-hff", "--hf-file"):
            self._file = given
        else:
            self._models.append(given)

    def _take_sampling(self, name: str, given: str | None) -> None:
        try:
            self._sampling[SAMPLING[name]] = json.loads(given or "")
        except ValueError:
            self.problems[name] = "it needs a number"

    def _take_words(self, name: str, peer: Peer, given: str) -> None:
        words = peer.words(given) if peer.words is not None else ()
        if isinstance(words, str):
            self.problems[name] = words
        elif not words:
            self.notices[name] = peer.needless
        for ours, value in () if isinstance(words, str) else words:
            if ours in self._own:
                self.taken.append(ours if value is None else f"{ours}={value}")
            else:
                self.problems[name] = self._of_other_command(ours) or f"here it is {ours}"

    def _finish(self) -> None:
        """Add what several options say together."""
        for model in self._models:
            if self._file:
                model = f"{model.partition(':')[0]}:{self._file}"
            self.taken.insert(0, model)
        if self._keys:
            self.taken.append(f"--api-key={','.join(self._keys)}")
        if not self._sampling:
            return
        if any(word.startswith("--generation-config=") for word in self.taken):
            self.problems[next(iter(SAMPLING))] = "give it as a field of --generation-config"
        elif "--generation-config" in self._own:
            self.taken.append(f"--generation-config={json.dumps(self._sampling)}")
        else:
            self.problems["--temp"] = "it is --generation-config of `penstock node`"

    def _meant(self, name: str) -> str:
        if other := self._of_other_command(name):
            return other
        if (peer := _peer(name)) is not None and (peer.flag in self._own or (peer.flag == MODEL and self._takes_model)):
            return f"?{peer.flag}"
        nearest = get_close_matches(name, [one for one in self._own if one.startswith("-")], n=1)
        return f"?{nearest[0]}" if nearest else ""

    def _of_other_command(self, name: str) -> str:
        other = {"node": "gateway", "gateway": "node"}.get(self._ctx.info_name)
        if other is None:
            return ""
        command = self._ctx.find_root().command.get_command(self._ctx, other)
        if name == MODEL:
            return f"a gateway has no model: it is an argument of `penstock {other}`" if other == "node" else ""
        has_it = any(name in (*one.opts, *one.secondary_opts) for one in command.params)
        return f"{name} is an option of `penstock {other}`" if has_it else ""


def _plain(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _peer(name: str) -> Peer | None:
    """Return what another server's option is here. `--no-x` and `--x.field` are as `--x`, unless they have an entry."""
    positive = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
    found = PEERS.get(name) or PEERS.get(positive) or PEERS.get(name.partition(".")[0])
    if found is None or name in PEERS:
        return found
    return found if found.needless and not found.flag and found.words is None else None


def _in_words(problems: dict[str, str]) -> str:
    if len(problems) > 1:
        return f"no options {_listed(problems.items())}"
    ((name, instead),) = problems.items()
    if instead.startswith("?"):
        return f"no option {name}; did you mean {instead[1:]}?"
    return f"no option {name}{': ' if instead else ''}{instead}"


def _listed(said: Iterable[tuple[str, str]]) -> str:
    texts = ((name, f"did you mean {why[1:]}?" if why.startswith("?") else why) for name, why in said)
    return ", ".join(f"{name} ({why})" if why else name for name, why in texts)


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help page with all options, if that is wanted, and end the command."""
    if wanted:
        ctx.meta[SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit
