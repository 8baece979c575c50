"""Jobs with adapters on real nodes: a takeover keeps every token, and a broken adapter ends no other job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.real_takeover import undisturbed
from faults.tools.takeover import Lane
from faults.tools.work import PROMPT, check_settled, holder
from fixtures.random_adapters import make_adapter
from fixtures.tiny_model import make_tiny_model
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM

from penstock.contract.errors import JobFailedError, NotFoundError
from penstock.kernels.cpu.probe import best_isa, cpu_flags
from penstock.producer.client import AsyncClient
from penstock.queue import keys

POOL = "adapted"
NUM_TOKENS = 1500
KILLED_AT = 200


@pytest.mark.skipif(best_isa(cpu_flags()) is None, reason="no native kernels on this CPU")
async def test_job_with_an_adapter_continues_token_exact(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    model, adapters = make_tiny_model(tmp_path / "tiny"), tmp_path / "adapters"
    base = AutoModelForCausalLM.from_pretrained(model)
    make_adapter(adapters / "tuned", base, seed=1)
    broken = make_adapter(adapters / "broken", base)
    (broken / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))

    def start(name: str) -> NodeProcess:
        fast = {"runner": "native", "dtype": "bfloat16", "num_threads": 1, "num_kv_blocks": 256}
        return NodeProcess(redis_url, model=model, pool=POOL, name=name, lease_ms=3000, lora_dir=adapters, **fast)

    options = {"temperature": 1.0, "seed": 7, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with Lane(redis, redis_url, POOL, start) as lane, AsyncClient(redis_url) as client:
        plain = await undisturbed(client, options, POOL)
        with pytest.raises(JobFailedError, match="peft_type 'IA3' is not supported") as caught:
            await (await client.submit(PROMPT, adapter="broken")).result()
        assert caught.value.code == "adapter_unusable"
        with pytest.raises(NotFoundError, match="served: broken, tuned"):
            await client.submit(PROMPT, adapter="other")
        hit = None
        while hit is None:
            work = await undisturbed(client, options | {"adapter": "tuned"}, POOL)
            hit = await lane.run(work, KILLED_AT, NUM_TOKENS)
            work.check()
        assert work.expected()[0].token_ids != plain.expected()[0].token_ids
        await check_settled(redis, POOL)


async def test_a_job_goes_to_a_node_that_has_its_adapter_and_ends_when_there_is_none(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    model, having, lacking = make_tiny_model(tmp_path / "tiny"), tmp_path / "having", tmp_path / "lacking"
    make_adapter(having / "tuned", AutoModelForCausalLM.from_pretrained(model), seed=1)
    lacking.mkdir()

    def start(folder: Path, **settings: int) -> NodeProcess:
        place = {"pool": POOL, "name": folder.name, "lease_ms": 3000, "lora_dir": folder, "dtype": "bfloat16"}
        return NodeProcess(redis_url, model=model, num_threads=1, num_kv_blocks=64, **place, **settings)

    with start(having, max_num_seqs=1) as owner, start(lacking):
        async with AsyncClient(redis_url) as client:
            options = {"adapter": "tuned", "max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
            jobs = [await client.submit(PROMPT, **options) for _ in range(8)]
            texts = {(await job.result()).choices[0].text for job in jobs}
            assert len(texts) == 1
            assert {await holder(redis, job.id) for job in jobs} == {"having"}
            assert int(await cast(Any, redis.hget(keys.counts(POOL), "given_back_lacking"))) > 0
            owner.kill()
            late = await client.submit(PROMPT, **options)
            with pytest.raises(JobFailedError) as caught:
                await late.result()
            assert caught.value.code == "adapter_not_found"
        await check_settled(redis, POOL)
