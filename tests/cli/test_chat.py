"""`penstock chat` on a real terminal and through pipes; the node is real, its engine is the reference one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.terminal import CTRL_C, CTRL_D, ENTER, TerminalProcess
from fakes.waiting import wait_until

from penstock.contract.fields import option_of
from penstock.contract.output import JobLedger
from penstock.contract.sampling import SamplingParams
from penstock.producer.client import Client
from penstock.queue.broker.jobs import JobStatus
from penstock.runtime.embedded_redis import EmbeddedRedis

PROMPT = ">>> "


@pytest.fixture(scope="module")
def pool() -> Iterator[str]:
    """URL of a Redis with a running node."""
    with EmbeddedRedis() as server, NodeProcess(server.url, step_s=0.01):
        yield server.url


def chat(redis_url: str, stdin: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run_command("chat", "--redis-url", redis_url, *options, stdin=stdin)


def on_terminal(redis_url: str, *options: str) -> TerminalProcess:
    return TerminalProcess("-m", "penstock", "chat", "--redis-url", redis_url, *options)


def say(terminal: TerminalProcess, text: str) -> None:
    """Type a message, and wait until its answer has begun."""
    terminal.press(text + ENTER)
    terminal.wait_for("\n")
    terminal.wait_for_more(10)


def newest(redis_url: str, tenant: str, state: str) -> JobStatus:
    """Wait until the newest job of this tenant is in this state, and return it."""
    with Client(redis_url, tenant=tenant) as client:
        return wait_until(lambda: client.jobs(limit=1).jobs[0], lambda job: job.state == state)


def prompt_tokens(ledger: JobLedger) -> int:
    assert ledger.usage is not None
    return ledger.usage.prompt_tokens


def test_each_line_of_a_pipe_is_a_message_and_answers_follow_the_conversation(pool: str) -> None:
    done = chat(pool, "one\n\ntwo\n", "--seed", "7", "--max-tokens", "5", "--system", "short")
    conversation = [{"role": "system", "content": "short"}]
    expected = ""
    with Client(pool) as client:
        for text in ("one", "two"):
            conversation.append({"role": "user", "content": text})
            answer = client.submit(conversation, seed=7, max_tokens=5).result().choices[0].text
            conversation.append({"role": "assistant", "content": answer})
            expected += answer + "\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_chat_takes_every_sampling_flag_of_submit(pool: str) -> None:
    flags = {
        f"--{name.replace('_', '-')}" for name in SamplingParams.model_fields if option_of(SamplingParams, name).flag
    }
    for command in ("chat", "submit"):
        assert flags <= set(re.findall(r"--[a-z-]+", run_command(command, "--help").stdout))
    done = chat(pool, "one\n", "--seed", "7", "--max-tokens", "5", "--min-p", "0.5", "--stop", "x", "--stop", "y")
    with Client(pool) as client:
        asked = [{"role": "user", "content": "one"}]
        answer = client.submit(asked, seed=7, max_tokens=5, min_p=0.5, stop=["x", "y"]).result().choices[0].text
    assert (done.returncode, done.stdout, done.stderr) == (0, answer + "\n", "")


def test_commands_change_the_conversation(pool: str) -> None:
    lines = ["one", "/clear", '"""two', "lines", '"""', "/retry", "/system S", "three", "/exit", "never"]
    done = chat(pool, "\n".join(lines), "--seed", "7", "--max-tokens", "5", "--tenant", "commands")
    assert done.returncode == 0, done.stderr
    with Client(pool, tenant="commands") as client:
        used = [prompt_tokens(job.ledger) for job in reversed(client.jobs().jobs)]
        answer = client.submit([{"role": "user", "content": "two\nlines"}], seed=7, max_tokens=5).result()
    block, text = len("two\nlines"), answer.choices[0].text
    assert used == [len("one"), block, block, len("S\ntwo\nlines\n\nthree") + len(text.encode())]


def test_an_unknown_command_is_refused_with_the_nearest_one(pool: str) -> None:
    done = chat(pool, "/cler\n/help\n")
    assert done.stderr.startswith("no command /cler; did you mean /clear?\n/clear ")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_block_may_begin_with_a_slash_and_may_end_with_the_input(pool: str) -> None:
    done = chat(pool, '"""/clear"""\n"""/help', "--seed", "7", "--max-tokens", "5")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 2)


def test_an_error_in_a_pipe_ends_the_chat_with_its_exit_code(pool: str) -> None:
    assert chat(pool, "one\n", "--model", "nonesuch").stderr.startswith("penstock: model 'nonesuch' is not served")
    done = chat(pool, "one\ntwo\n", "--stop", "")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "penstock: --stop[0]: must have at least 1 characters\n",
    )


def test_verbose_prints_the_speed_of_each_answer(pool: str) -> None:
    done = chat(pool, "one\ntwo\n", "--max-tokens", "5", "--seed", "7", "--verbose")
    assert done.stderr.count("5 tokens: the first after ") == 2


def test_an_answer_appears_while_it_is_generated_and_ctrl_c_cancels_its_job(pool: str) -> None:
    # Also on a slow machine it runs until it is cancelled.
    with on_terminal(pool, "--tenant", "stopped", "--max-tokens", "5000") as terminal:
        terminal.wait_for(PROMPT)
        say(terminal, "hello")
        assert newest(pool, "stopped", "running").outcome is None

        terminal.press(CTRL_C)
        terminal.wait_for("stopped")
        ended = newest(pool, "stopped", "cancelled")
        assert ended.outcome is not None and ended.outcome.state == "cancelled"

        # The stopped answer stays in the conversation, which goes on.
        terminal.wait_for(PROMPT)
        say(terminal, "go on")
        terminal.press(CTRL_C)
        terminal.wait_for(PROMPT)
        last = newest(pool, "stopped", "cancelled")
        assert last.job_id != ended.job_id
        assert prompt_tokens(last.ledger) >= len("hello\n\ngo on") + 10

        terminal.press(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.parametrize("key", [CTRL_C, CTRL_D])
def test_ctrl_c_and_ctrl_d_leave_at_the_prompt(pool: str, key: str) -> None:
    with on_terminal(pool) as terminal:
        terminal.wait_for(PROMPT)
        assert terminal.leave(key) == 0


def test_an_error_on_a_terminal_is_one_line_and_the_chat_goes_on(pool: str) -> None:
    with on_terminal(pool, "--stop", "") as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("hello" + ENTER)
        assert "penstock: stop[0]: must have at least 1 characters" in terminal.wait_for(PROMPT)


def test_earlier_messages_can_be_recalled_with_the_arrow_keys(pool: str) -> None:
    with on_terminal(pool) as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("/unknown" + ENTER)
        terminal.wait_for(PROMPT)
        terminal.press("\x1b[A" + ENTER)
        assert "no command /unknown" in terminal.wait_for(PROMPT)


def test_a_terminal_gets_no_control_characters_of_an_answer() -> None:
    import io

    from penstock.cli.chat import Terminal

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, pipe = Screen(), io.StringIO()
    for stdout in (screen, pipe):
        Terminal(io.StringIO(), stdout).write("a\x1b[2J\x9b\tb\nü")
    assert (screen.getvalue(), pipe.getvalue()) == ("a[2J\tb\nü", "a\x1b[2J\x9b\tb\nü")
