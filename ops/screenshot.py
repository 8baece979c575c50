"""Take the screenshot in docs/HTTP.md: the web page in front of real nodes under load, after one of them was killed.

`.venv/bin/python ops/screenshot.py` writes ops/screenshot.png. It needs Chromium, the demo model, and two minutes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

from penstock import AsyncClient, Priority
from penstock.cli.demo_model import demo_model
from penstock.runtime.embedded_redis import EmbeddedRedis

OUTPUT = Path(__file__).with_suffix(".png")
CHROMIUM = os.environ.get("PENSTOCK_CHROMIUM", "/usr/bin/chromium")
QUESTION = "What does a water turbine do? Then write a Python function that computes its power."
PARAMETERS = """localStorage.setItem("penstock-settings", '{"temperature": "0", "max_tokens": "220"}')"""
SUBJECTS = ("rivers", "dams", "valves", "pumps", "canals", "mills", "locks", "wells")
TENANTS = {"shop": Priority.STANDARD, "search": Priority.STANDARD, "reports": Priority.BATCH}
CALLERS = 12
"""Of each tenant, each with one job at a time."""
NODES = ("node-a", "node-b", "node-c")
NODE_SETTINGS = {
    "PENSTOCK_NODE_MODEL": str(demo_model()),
    "PENSTOCK_NODE_LEASE_MS": "4000",
    "PENSTOCK_NODE_KV_CACHE_GIB": "0.08",
    "PENSTOCK_NODE_MAX_NUM_SEQS": "12",
    "PENSTOCK_NODE_PROGRESS": "json",
    "PENSTOCK_GATEWAY_PROGRESS": "json",
    "PENSTOCK_GATEWAY_PORT": "0",
}
LOAD_S = 30
"""Seconds of load before the kill, so that the charts show something."""
NUM_COLORS = 256
PHONE, DESKTOP, HEIGHT = 400, 1000, 1040


@contextmanager
def running(command: str, redis_url: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Run a penstock command; yield the process, and what it reported when it was ready."""
    settings = os.environ | NODE_SETTINGS | env | {"PENSTOCK_REDIS_URL": redis_url}
    process = subprocess.Popen([sys.executable, "-m", "penstock", command], env=settings, stdout=subprocess.PIPE)
    assert process.stdout is not None
    events = (json.loads(line) for line in process.stdout)
    try:
        yield process, next(event for event in events if event["event"] == "ready")
    finally:
        process.kill()
        process.wait()


async def load(client: AsyncClient, priority: Priority, number: int) -> None:
    """Ask one question after the other."""
    while True:
        prompt = f"Write a long story about {SUBJECTS[number % len(SUBJECTS)]}, part {number}."
        job = await client.submit(prompt, max_tokens=400, temperature=0.8, priority=priority)
        await job.result()


async def ask(page: Page, url: str) -> None:
    """Begin a chat."""
    await page.add_init_script(PARAMETERS)
    await page.goto(url)
    await page.wait_for_selector("#model option", state="attached")
    await page.get_by_label("Message").fill(QUESTION)
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".said p")


async def combined(browser: Browser, images: list[bytes]) -> bytes:
    """Return the images side by side."""
    shown = "".join(f'<img src="data:image/png;base64,{base64.b64encode(image).decode()}">' for image in images)
    page = await browser.new_page(viewport={"width": PHONE + DESKTOP + 60, "height": HEIGHT + 40})
    await page.set_content(
        "<style>body{display:flex;gap:20px;margin:20px;background:#cfd6de}img{border-radius:10px}</style>" + shown
    )
    return await page.screenshot()


async def photograph(url: str, victim: subprocess.Popen[bytes]) -> None:
    """Chat, watch, kill a node, and take both pictures once its jobs moved."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        board = await browser.new_page(viewport={"width": DESKTOP, "height": HEIGHT}, color_scheme="light")
        await board.goto(f"{url}/#dashboard")
        await asyncio.sleep(LOAD_S)
        chat = await browser.new_page(viewport={"width": PHONE, "height": HEIGHT}, color_scheme="dark")
        await ask(chat, url)
        victim.kill()
        await board.get_by_text("its node was lost").first.wait_for()
        await chat.wait_for_selector(".answer .said[aria-busy=false]", timeout=90_000)
        image = await combined(browser, [await chat.screenshot(), await board.screenshot()])
        Image.open(BytesIO(image)).quantize(NUM_COLORS).save(OUTPUT, optimize=True)
        await browser.close()


async def main() -> None:
    """Start everything, and take the screenshot under load."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(EmbeddedRedis()).url
        nodes = [stack.enter_context(running("node", redis_url, PENSTOCK_NODE_NAME=name))[0] for name in NODES]
        _, gateway = stack.enter_context(running("gateway", redis_url))
        async with asyncio.TaskGroup() as group:
            clients = [AsyncClient(redis_url, tenant=tenant) for tenant in TENANTS]
            callers = [
                group.create_task(load(await client.connect(), priority, number))
                for client, priority in zip(clients, TENANTS.values(), strict=True)
                for number in range(CALLERS)
            ]
            await photograph(gateway["url"], nodes[-1])
            for caller in callers:
                caller.cancel()
        for client in clients:
            await client.close()


if __name__ == "__main__":
    asyncio.run(main())
    print(OUTPUT, OUTPUT.stat().st_size, "bytes")
