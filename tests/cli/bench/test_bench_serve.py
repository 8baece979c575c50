"""`penstock bench serve` measures what a server with known delays, counts and faults does."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from fakes.command import run_command

from penstock.cli.bench.connection import MAX_WHOLE_BYTES, AnswerRecorder
from penstock.cli.bench.prompts import RequestRecord
from tests.cli.bench.stub_server import NUM_PROBES, StubServer, running

TTFT_S, ITL_S = 0.6, 0.01
"""The first is long, because a busy machine delivers first tokens 0.1 s late."""


def bench(server: StubServer, *arguments: str, status: int = 0) -> dict[str, Any]:
    """The document that a load on the server gives."""
    done = run_command("bench", "serve", "--base-url", server.url, "--output-json", "-", *arguments)
    assert done.returncode == status, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def table(server: StubServer, *arguments: str) -> str:
    return run_command("bench", "serve", "--base-url", server.url, *arguments, COLUMNS="80").stdout


def test_measured_times_are_those_of_the_server() -> None:
    with running(StubServer(TTFT_S, ITL_S)) as server:
        found = bench(server, "--num-prompts", "40", "--request-rate", "40", "--random-output-len", "21")
    assert found["completed"] == 40
    # The server's clock says what its delays really were on a busy machine, where the client may read late.
    first_s, last_s = zip(*server.times_s[NUM_PROBES:], strict=True)
    assert min(first_s) >= 0.95 * TTFT_S
    per_token_s = [(last - first) / 20 for first, last in zip(first_s, last_s, strict=True)]
    of_server = {"ttft": first_s, "tpot": per_token_s, "e2el": last_s}
    quotients = {name: found[f"median_{name}_ms"] / (1000 * median(times)) for name, times in of_server.items()}
    # Two events that are read late together have no gap.
    quotients["itl"] = found["mean_itl_ms"] / (1000 * mean(server.gaps_s))
    assert min(quotients["ttft"], quotients["e2el"]) >= 0.99, quotients
    assert min(quotients.values()) > 0.8 and max(quotients.values()) < 1.4, quotients
    assert found["total_output_tokens"] == 40 * 21
    assert found["output_throughput"] == pytest.approx(40 * 21 / found["duration"])
    assert found["request_throughput"] == pytest.approx(40 / found["duration"])


def test_arrivals_do_not_wait_for_answers() -> None:
    with running(StubServer(ttft_s=1.0)) as server:
        found = bench(server, "--num-prompts", "30", "--request-rate", "100", "--random-output-len", "1")
    late_s = [start - due for start, due in zip(found["start_times"], found["due_times"], strict=True)]
    # One after the other, half of them would be 15 s late. A machine with other work may start them a little late.
    assert median(late_s) < 5
    assert found["max_concurrent_requests"] > 5
    assert found["due_times"] == sorted(found["due_times"])
    assert found["p50_lateness_ms"] < 5000


def test_max_concurrency_bounds_open_requests_and_shows_the_wait() -> None:
    with running(StubServer(ttft_s=0.2)) as server:
        found = bench(server, "--num-prompts", "6", "--max-concurrency", "2", "--random-output-len", "1")
        shown = table(server, "--num-prompts", "3", "--max-concurrency", "1", "--random-output-len", "1")
    assert found["max_concurrent_requests"] == 2
    assert found["p99_slot_wait_ms"] > 300
    # The wait is in no time to first token: those of two slots fit into twice the duration.
    assert sum(found["ttfts"]) <= 2 * found["duration"]
    assert "waited for a slot" in shown


def test_failures_are_counted_by_their_reason() -> None:
    faults = {0: "429", 1: "429", 2: "drop", 3: "cut", 4: "error_event", 5: "no_end", 6: "not_json", 7: "hang"}
    with running(StubServer(faults=faults)) as server:
        arguments = ("--num-prompts", "12", "--max-concurrency", "1", "--random-output-len", "4")
        found = bench(server, *arguments, "--request-timeout", "0.5")
    assert (found["completed"], found["failed"]) == (4, 8)
    assert {reason: failure["count"] for reason, failure in found["failures"].items()} == {
        "HTTP 429": 2,
        "connection lost before the answer": 1,
        "connection lost in the answer": 1,
        "error event: node_lost": 1,
        "stream ended early": 1,
        "event is not JSON": 1,
        "timeout": 1,
    }
    assert found["failures"]["HTTP 429"]["example"] == "too busy"
    assert found["errors"][4] == "error event: node_lost: the node is gone"
    assert found["total_output_tokens"] == 4 * 4
    assert len(found["itls"]) == 12


def test_a_load_without_any_answer_fails() -> None:
    with running(StubServer(faults={0: "429", 1: "429"})) as server:
        assert bench(server, "--num-prompts", "2", status=1)["median_ttft_ms"] is None
        server.faults = {4: "429", 5: "429"}
        shown = table(server, "--num-prompts", "2")
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"failures +reason +first message", shown)
    assert re.search(r"2 +HTTP 429 +too busy", shown)


def test_tokens_are_the_servers_where_an_event_has_several() -> None:
    with running(StubServer(0.02, 0.1, tokens_per_event=3)) as server:
        found = bench(server, "--num-prompts", "4", "--random-output-len", "12")
    assert found["total_output_tokens"] == 48
    assert found["tokens_per_event"] == 3
    # The gaps are what was measured on this machine, busy or not. There is one after each event but the last.
    assert [len(gaps_s) for gaps_s in found["itls"]] == [3] * 4
    assert found["median_itl_ms"] == pytest.approx(
        1000 * median(gap_s for one in found["itls"] for gap_s in one), rel=0.01
    )
    assert found["median_tpot_ms"] == pytest.approx(1000 * median(sum(one) / 11 for one in found["itls"]), rel=0.01)
    assert "3.00 tokens" in found["notes"][0]


def test_usage_in_each_event_counts_tokens() -> None:
    with running(StubServer(tokens_per_event=3, usage="in each event")) as server:
        found = bench(server, "--num-prompts", "2", "--random-output-len", "12")
    assert (found["total_output_tokens"], found["num_with_usage"]) == (24, 2)


def test_events_are_counted_where_a_server_reports_no_usage() -> None:
    with running(StubServer(usage="none")) as server:
        found = bench(server, "--num-prompts", "2", "--random-output-len", "5")
    assert (found["total_output_tokens"], found["num_with_usage"]) == (10, 0)
    assert [note.partition(":")[0] for note in found["notes"]] == [
        "The server reports no usage",
        "2 answers came without usage",
    ]


def test_a_server_that_refuses_stream_options_is_asked_without_them() -> None:
    with running(StubServer(refuses_stream_options=True)) as server:
        found = bench(server, "--num-prompts", "2")
    assert found["completed"] == 2
    assert found["notes"][0] == "The server refuses stream_options.include_usage."


@pytest.mark.parametrize(
    "server",
    [StubServer(newline=b"\r\n"), StubServer(is_streamed=False), StubServer(faults={0: "until_closed"})],
    ids=["crlf", "whole", "until closed"],
)
def test_any_framing_of_an_answer_is_read(server: StubServer) -> None:
    with running(server):
        found = bench(server, "--num-prompts", "1", "--random-output-len", "5")
    assert (found["completed"], found["output_lens"]) == (1, [5])


@pytest.mark.parametrize("wanted", [20, 400])
def test_prompts_have_the_wanted_number_of_the_servers_tokens(wanted: int) -> None:
    with running(StubServer()) as server:
        found = bench(server, "--num-prompts", "3", "--random-input-len", str(wanted), "--random-output-len", "1")
    assert all(abs(length - wanted) <= 1 for length in found["input_lens"])
    prompts = [body["messages"][0]["content"] for body in server.load]
    assert len(set(prompts)) == 3


def test_lengths_vary_within_the_range_and_share_the_prefix() -> None:
    with running(StubServer()) as server:
        lengths = ("--random-input-len", "100", "--random-output-len", "10", "--random-range-ratio", "0.5")
        found = bench(server, "--num-prompts", "30", *lengths, "--random-prefix-len", "40", "--endpoint", "completions")
    assert 5 <= min(found["output_lens"]) < max(found["output_lens"]) <= 15
    assert 50 + 39 <= min(found["input_lens"]) < max(found["input_lens"]) <= 150 + 41
    assert len({tuple(body["prompt"].split()[:20]) for body in server.load}) == 1
    assert len({body["prompt"] for body in server.load}) == 30


def test_equal_seeds_give_equal_requests() -> None:
    def prompts(seed: int) -> list[str]:
        with running(StubServer()) as server:
            bench(server, "--num-prompts", "5", "--random-output-len", "1", "--seed", str(seed))
        return sorted(body["messages"][0]["content"] for body in server.load)

    assert prompts(1) == prompts(1) != prompts(2)


def test_server_options_reach_every_request() -> None:
    with running(StubServer()) as server:
        options = ("--api-key", "pk-1", "--header", "X-Team=blue", "--ignore-eos", "--temperature", "0")
        url = ("--base-url", f"{server.url}/v1/", "--endpoint", "/v1/completions", "--model", "other")
        bench(server, *url, *options, "--extra-body", '{"top_k": 3}', "--num-prompts", "1")
    assert all("Authorization: Bearer pk-1\r\n" in head and "X-Team: blue\r\n" in head for head in server.heads)
    (body,) = server.load
    wanted = {"ignore_eos": True, "temperature": 0.0, "top_k": 3, "model": "other", "max_tokens": 128}
    assert wanted.items() <= body.items()
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")


def test_warmups_come_first_and_are_not_measured() -> None:
    with running(StubServer()) as server:
        found = bench(server, "--num-prompts", "2", "--num-warmups", "3", "--random-output-len", "1")
    assert len(server.load) == 5
    assert found["completed"] == len(found["ttfts"]) == 2
    texts = [body["messages"][0]["content"] for body in server.load]
    assert len(set(texts)) == 5


def test_no_request_starts_after_the_duration() -> None:
    with running(StubServer(ttft_s=0.05)) as server:
        limits = ("--max-concurrency", "1", "--duration", "0.3")
        found = bench(server, "--num-prompts", "100", "--random-output-len", "1", *limits)
    assert 1 <= found["completed"] <= 7
    assert max(found["start_times"]) <= 0.3


def test_goodput_counts_requests_within_all_limits() -> None:
    with running(StubServer(0.05, 0.01)) as server:
        arguments = ("--num-prompts", "4", "--random-output-len", "5", "--goodput", "ttft:2000", "tpot:500")
        found = bench(server, *arguments)
        late = bench(server, *arguments, "e2el:20")
        shown = table(server, *arguments)
    assert found["goodput"] == {"ttft": 2000, "tpot": 500}
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert (late["request_goodput"], late["completed"]) == (0, 4)
    assert "100.0%" in shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "mooncake.jsonl",
            '{"timestamp": 1000, "input_length": 101, "output_length": 3, "hash_ids": [7, 8]}\n'
            '{"timestamp": 1200, "input_length": 201, "output_length": 5, "hash_ids": [7, 9]}\n',
        ),
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,101,3\n2023-11-16 18:15:46.8805900,201,5\n",
        ),
        (
            "burst.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,101,3,104,API log\n5.1,ChatGPT,50,0,50,API log\n5.2,ChatGPT,201,5,206,API log\n",
        ),
    ],
)
def test_public_traces_are_replayed(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with running(StubServer()) as server:
        found = bench(server, "--trace", str(tmp_path / name), "--trace-speed", "2")
    assert found["due_times"] == pytest.approx([0, 0.1], abs=1e-6)
    assert found["output_lens"] == [3, 5]
    assert found["input_lens"] == [101, 201]
    first, second = (body["messages"][0]["content"].split() for body in server.load)
    assert (first == second[: len(first)]) == (name == "mooncake.jsonl")


def test_a_traces_own_prompts_are_sent(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = [{"arrival_s": 0, "prompt": "a b", "max_tokens": 2}, {"arrival_s": 0.1, "messages": chat, "max_tokens": 3}]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with running(StubServer()) as server:
        assert bench(server, "--trace", str(trace))["output_lens"] == [2, 3]
    assert [body["messages"] for body in server.load] == [[{"role": "user", "content": "a b"}], chat]


def test_prompts_come_from_a_dataset(tmp_path: Path) -> None:
    human, model = {"from": "human", "value": "how tall"}, {"from": "gpt", "value": "three words long"}
    shares = tmp_path / "share.json"
    shares.write_text(json.dumps([{"conversations": [human, model]}, {"conversations": [human]}]))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 9}\n')
    with running(StubServer()) as server:
        assert bench(server, "--dataset-path", str(shares), "--num-prompts", "2")["output_lens"] == [4, 4]
        found = bench(server, "--dataset-path", str(lines), "--num-prompts", "2", "--dataset-output-len", "6")
    assert found["output_lens"] == [6, 6]
    assert {body["messages"][0]["content"] for body in server.bodies[-2:]} == {"one", "two"}


def test_bursts_vary_more_than_even_arrivals() -> None:
    def spread(burstiness: str) -> float:
        with running(StubServer()) as server:
            found = bench(
                server,
                *("--num-prompts", "400", "--request-rate", "2000", "--burstiness", burstiness),
                *("--random-output-len", "1", "--random-input-len", "10"),
            )
        gaps = [after - before for before, after in pairwise([0.0, *found["due_times"]])]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(1 / 2000, rel=0.4)
        return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)

    assert spread("0.25") > 1.5 > spread("1") > 0.7 > spread("9")


def test_a_plot_is_a_file_without_references(tmp_path: Path) -> None:
    plot = tmp_path / "load.svg"
    with running(StubServer(faults={1: "429"})) as server:
        bench(server, "--num-prompts", "5", "--plot", str(plot), "--random-output-len", "3")
    text = plot.read_text()
    assert text.count("<path") > 10
    assert "<image" not in text
    assert "@import" not in text


def test_the_document_has_vllms_keys(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with running(StubServer()) as server:
        done = run_command(
            *("bench", "serve", "--base-url", server.url, "--output-json", str(file)),
            *("--num-prompts", "2", "--metric-percentiles", "25,99.9"),
        )
    assert "completed" in done.stdout
    found = json.loads(file.read_text())
    names = "date backend model_id num_prompts request_rate burstiness max_concurrency duration completed failed"
    names += " total_input_tokens total_output_tokens request_throughput request_goodput output_throughput"
    names += " total_token_throughput max_output_tokens_per_s max_concurrent_requests input_lens output_lens ttfts itls"
    names += " errors start_times p25_ttft_ms p99.9_itl_ms mean_tpot_ms median_e2el_ms std_ttft_ms"
    assert set(names.split()) <= found.keys()
    assert found["request_rate"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goodput", "ttfb:3"), "goodput: 'ttfb:3' is not METRIC:MS with a METRIC of ttft, tpot, e2el"),
        (("--goodput", "ttft"), "goodput: 'ttft' is not METRIC:MS with a METRIC of ttft, tpot, e2el"),
        (("--request-rate", "0"), "request_rate: must be above 0"),
        (("--request-rate", "nan"), "request_rate: must be above 0"),
        (("--burstiness", "inf"), "burstiness: must be a finite number"),
        (("--random-range-ratio", "1"), "random_range_ratio: must be below 1"),
        (("--metric-percentiles", "50,101"), "metric_percentiles: must be numbers from 0 to 100 with commas"),
        (("--plot", "x.gif"), "plot: the name must end in .svg, .png, .pdf"),
        (("--output-json", "/nowhere/x.json"), "output_json: cannot write to the folder of /nowhere/x.json"),
        (("--extra-body", "[]"), "extra_body: must be a JSON object"),
        (("--header", "X-Team"), "header: 'X-Team' is not NAME=VALUE"),
        (("--endpoint", "embeddings"), "endpoint: must be chat, completions, or a path that ends in /completions"),
        (("--base-url", "ftp://x"), "base_url: 'ftp://x' is not an http or https URL"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    done = run_command("bench", "serve", "--base-url", "http://127.0.0.1:9", *arguments)
    assert done.returncode == 2
    # An error may name the field or its option.
    assert message.replace("-", "_") in done.stderr.replace("-", "_")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "the server requires an API key; give --api-key or OPENAI_API_KEY"),
        (("--api-key", "wrong"), "the server refuses the API key; give --api-key or OPENAI_API_KEY"),
    ],
)
def test_a_missing_api_key_is_named_with_its_option(options: tuple[str, ...], message: str) -> None:
    with running(StubServer(requires_key=True)) as server:
        done = run_command("bench", "serve", "--base-url", server.url, *options)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"timestamp": 1}\n', "a.jsonl, line 1: lacks 'max_tokens'"),
        ("a.jsonl", "[]\n", "a.jsonl, line 1: not a JSON object"),
        ("a.csv", "a,b\n1,2\n", "needs the columns TIMESTAMP, ContextTokens, GeneratedTokens or Timestamp"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "a.csv, line 2: "),
        ("a.jsonl", "", "a.jsonl has no requests"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with running(StubServer()) as server:
        done = run_command("bench", "serve", "--base-url", server.url, "--trace", str(tmp_path / name))
    assert done.returncode == 2
    assert message in done.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    done = run_command("bench", "serve", "--base-url", "http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (
        75,
        "penstock: no answer from 127.0.0.1:9: cannot connect: Connection refused; --base-url names another server\n",
    )


def test_a_line_without_an_end_is_an_error_and_is_not_kept() -> None:
    record = RequestRecord(0.0)
    recorder = AnswerRecorder(record)
    recorder.begin(200, "text/event-stream")
    for _ in range(2 * MAX_WHOLE_BYTES >> 16):
        recorder.feed(b"a" * (1 << 16), 1.0)
    assert (record.error, record.detail) == (
        "a line is too long",
        "more than 16777216 bytes came without the end of a line",
    )
    recorder.feed(b'\n\ndata: {"choices": [{"text": "hi"}]}\n\n', 2.0)
    assert list(record.token_events_s) == [2.0]
