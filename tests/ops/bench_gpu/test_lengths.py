"""The lengths of the benchmark's requests."""

from __future__ import annotations

from bench_gpu.load import make_requests, sharegpt_lengths


def test_lengths_like_sharegpts_have_the_means_and_the_limits_of_vllms_benchmark() -> None:
    lengths = sharegpt_lengths(20_000)
    prompts, outputs = lengths.mean(axis=0)
    assert abs(prompts - 217) < 5
    assert abs(outputs - 200) < 5
    assert lengths.min() >= 4
    assert lengths[:, 0].max() <= 1024
    assert lengths.sum(axis=1).max() <= 2048


def test_requests_have_the_lengths_that_are_asked_for() -> None:
    lengths = sharegpt_lengths(5, divisor=10)
    requests = make_requests(lengths)
    assert [[len(one.token_ids), one.end_rule.max_tokens] for one in requests] == lengths.tolist()
